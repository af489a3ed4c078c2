"""The zoo, converted and compared: models of ten libraries, and some as research code writes them.

``syncpipe.sequential`` makes layers of each model. Pipes of two and three stages train them for a
step on micro-batches, and are compared with the plain model that is fed the micro-batches. A row
that is in ``benchmark-report/converted`` is not made again, so a run that was stopped goes on, and
several runs beside each other share the work.
"""

from __future__ import annotations

import copy
import functools
import gc
import json
import re
import signal
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Group, Options, Part
from benchmarks.zoo.diffusion import DIFFUSION
from benchmarks.zoo.entry import Arguments, Model
from benchmarks.zoo.language import DECODERS, ENCODERS, TRANSLATORS
from benchmarks.zoo.libraries import LIBRARIES
from benchmarks.zoo.senses import SENSES
from benchmarks.zoo.vision import TIMM, TORCHVISION
from benchmarks.zoo.written import WRITTEN
from syncpipe import Pipe, sequential, verify
from syncpipe.compare import Comparison, compare
from syncpipe.data.batches import gather, scatter, unwrapped
from syncpipe.data.trees import by_name, flatten, tensors_in
from syncpipe.layers.conversion.sequential import Converted
from syncpipe.layers.conversion.signature import call_arguments, call_input, common_outputs

__all__ = ["MODELS", "compared", "row", "without_dropout"]

MODELS: dict[str, Model] = {
    f"{prefix}{name}": made
    for prefix, table in {
        "torchvision ": TORCHVISION, "timm ": TIMM, "diffusers ": DIFFUSION,
        "HF ": DECODERS | ENCODERS | TRANSLATORS | SENSES, "": LIBRARIES | WRITTEN,
    }.items()
    for name, made in table.items()
}  # fmt: skip
PACKAGES = tuple(dict.fromkeys(made.package.partition(".")[0] for made in MODELS.values()))
_LIMIT = 600  #: seconds for a model
_FOLDER = Path("benchmark-report/converted")
_WORDS = {"equal": "to the bit", "rounding": "to rounding", "verified": "verified"}


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with all rates of dropout zero: a pipe draws in another order."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if type(value) is float and ("drop" in name or (name == "p" and 0 < value < 1)):
                setattr(module, name, 0.0)
    return model


def loss_of(output: Any) -> Tensor:
    """A number of all tensors in an output."""
    found = [t.float().square().mean() for t in tensors_in(output) if t.is_floating_point()]
    return torch.stack(found).sum()


def _values(pipe: nn.Module, **more: Any) -> dict[str, Any]:
    """Gradients, parameters and saved buffers by name, and other values."""
    gradients = {f"gradient of {name}": p.grad for name, p in pipe.named_parameters()}
    return {**more, **pipe.state_dict(), **gradients}


def _draws(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether the model in training draws random numbers."""
    state = torch.get_rng_state()
    with torch.no_grad():
        copy.deepcopy(model).train()(*args, **kwargs)
    return not torch.equal(state, torch.get_rng_state())


def pinned(layers: Converted) -> bool:
    """Whether the layers take only batches of the sample's size."""
    signature: Any = layers[0]._model_signature
    return not any(d == 0 and signature.is_cut[k] for k, d in signature.free)


def compared(model: nn.Module, layers: Converted, made: Model) -> str:
    """Whether pipes of two and three stages do what the model does.

    A step of AdamW in training, on 5 samples in two micro-batches, then evaluation of 3 samples.
    If the layers take batches of the sample's size only, it is 4 and 4. ``verify`` compares a model
    that draws random numbers, because a pipe draws others than the plain model.

    Args:
        model: as it was converted; it is left as it is.
        layers: of the model.
        made: makes more samples.
    """
    worst = Comparison()
    sizes = (4, 4) if pinned(layers) else (5, 3)
    for stages in {min(n, len(layers)) for n in (2, 3)}:
        each = len(layers) // stages
        balance = [each] * (stages - 1) + [len(layers) - each * (stages - 1)]
        training, evaluation = (made.sample(size) for size in sizes)
        devices = [f"cpu:{k}" for k in range(stages)]
        if _draws(model, *training):
            args, kwargs = made.sample(2)
            pipe = Pipe(layers.train(), balance, devices=devices, chunks=1)
            input = call_input(layers, args, kwargs)
            report = verify(pipe, input, loss_fn=loss_of, schedules="1f1b")
            return "verified" if report.ok else f"no: {report}"
        plain, copied = copy.deepcopy(model), copy.deepcopy(layers)
        pipe = Pipe(copied, balance, devices=devices, chunks=2)
        found = compare(*_trained(pipe, plain, copied, training))
        if found.same:
            found = max(found, _evaluated(pipe, plain, copied, evaluation), key=_rank)
        worst = max(worst, found, key=_rank)
    return _WORDS.get(worst.status, f"no: {worst.at} {worst.words or worst}")


def _rank(found: Comparison) -> tuple[int, float]:
    return ("none", "equal", "rounding", "different").index(found.status), found.distance


def _pieces(layers: Converted, arguments: Arguments, chunks: int) -> tuple[Any, list[Arguments]]:
    """The input of a pipe for a call, and the arguments of each micro-batch for the model."""
    packed = call_input(layers, *arguments)
    cut = [unwrapped(piece) for piece in scatter(packed, chunks)]
    return packed, [(*call_arguments(layers, piece), size) for piece, size in cut]


def _trained(pipe: Pipe, plain: nn.Module, layers: Converted, arguments: Arguments) -> Any:
    """Values of the pipe and of the plain model after a step."""
    packed, pieces = _pieces(layers, arguments, pipe.chunks)
    total = sum(size for *_, size in pieces)
    pipe.train(), plain.train()
    torch.manual_seed(1)
    loss = pipe.train_batch(packed, loss_fn=loss_of)
    torch.manual_seed(1)
    parts = []
    for args, kwargs, size in pieces:
        part = loss_of(plain(*args, **kwargs)) * (size / total)
        part.backward()
        parts.append(part.detach())
    for module in (pipe, plain):
        torch.optim.AdamW(module.parameters(), 1e-3, eps=1e-4).step()
    return _values(pipe, loss=loss), _values(plain, loss=torch.stack(parts).sum())


def _evaluated(pipe: Pipe, plain: nn.Module, layers: Converted, arguments: Arguments) -> Comparison:
    """Compares outputs; losses if an output is a mean, of which each micro-batch has its own."""
    pipe.eval(), plain.eval(), layers.eval()
    packed, pieces = _pieces(layers, arguments, pipe.chunks)
    torch.manual_seed(1)
    with torch.no_grad():
        theirs = [plain(*args, **kwargs) for args, kwargs, _ in pieces]
        torch.manual_seed(1)
        common, leaves = common_outputs(layers), flatten(theirs[0], batches=True)[0]
        if any(
            k not in common and isinstance(leaf, Tensor) and not leaf.dim()
            for k, leaf in enumerate(leaves)
        ):
            sizes = [size for *_, size in pieces]
            parts = [
                loss_of(each) * (n / sum(sizes)) for each, n in zip(theirs, sizes, strict=True)
            ]
            ours = pipe.eval_batch(packed, loss_fn=loss_of)
            return compare({"loss": ours}, {"loss": torch.stack(parts).sum()})
        args, kwargs = arguments
        ours = pipe(*args, **kwargs)
    return compare(by_name("output", ours), by_name("output", gather(theirs, common)))


# Rows


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Raises a ``TimeoutError`` in what takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _counted(model: nn.Module) -> Iterator[Counter[str]]:
    """Counts the calls of a model."""
    kind, count = type(model), Counter[str]()
    own, forward = "forward" in vars(kind), kind.forward

    @functools.wraps(forward)
    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        count["runs"] += self is model
        return forward(self, *args, **kwargs)

    kind.forward = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        if own:
            kind.forward = forward  # type: ignore[method-assign]
        else:
            del kind.forward


def _seconds(call: Callable[[], Any]) -> float:
    """The seconds of the processor that a call takes, the least of three."""
    found = []
    for _ in range(3):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def _told(error: BaseException) -> str:
    """A message in one line, without the folders of packages."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"/\S*/(site-packages|zoo)/", "", words)[:400]


def row(name: str, made: Model) -> dict[str, Any]:
    """What became of a model.

    Raises:
        ImportError: its package is not installed.
    """
    torch.manual_seed(0)
    model, args, kwargs = made.make(batch=2)
    without_dropout(model.train())
    told: dict[str, Any] = {"model": name}
    try:
        with _at_most(_LIMIT), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            forward = _seconds(partial(copy.deepcopy(model), *args, **kwargs))
            start = time.process_time()
            with _counted(model) as count:
                layers = sequential(model, *args, **kwargs)
            took = time.process_time() - start
            told |= {"layers": len(layers)} | _described(model, layers)
            told |= {"runs": count["runs"], "forwards": round(took / forward), "s": round(took, 1)}
            told["batch"] = "only the sample's" if pinned(layers) else "any"
            told["equal"] = compared(model, layers, made)
    except Exception as error:
        told["equal" if "layers" in told else "refused"] = _told(error)
    return told


def _described(model: nn.Module, layers: Converted) -> dict[str, Any]:
    """The share of the largest layer and of the largest module, and what was left whole."""
    total = sum(p.numel() for p in model.parameters())
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    whole = dict.fromkeys(type(model.get_submodule(each.path)).__name__ for each in layers.whole)
    return {"largest": f"{max(sizes) / total:.0%}", "left whole": ", ".join(whole)}


def _row_of(name: str, made: Model) -> dict[str, Any] | None:
    """The row of a model, from the file of an earlier run if there is one.

    None if another run makes it now.
    """
    _FOLDER.mkdir(parents=True, exist_ok=True)
    path = _FOLDER / (re.sub(r"\W+", "_", name) + ".json")
    if path.exists() and not path.read_text(encoding="utf-8"):
        if time.time() - path.stat().st_mtime < 3 * _LIMIT:
            return None
        path.unlink()
    try:
        path.open("x").close()
    except FileExistsError:
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    try:
        found = row(name, made)
    except BaseException:
        path.unlink()
        raise
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def run(package: str, options: Options) -> Part:
    """Converts all of a package."""
    part = Part(
        f"Models of {package}" if package else "Models as research code writes them",
        "Random weights, small configurations, sample of 2, rates of dropout 0.",
        _DEFINITIONS,
        over="One run.",
    )
    found = [(n, made) for n, made in MODELS.items() if made.package.partition(".")[0] == package]
    for name, made in found[: 1 if options.quick else None]:
        try:
            told = row(name, made) if options.quick else _row_of(name, made)
        except ImportError as error:
            part.tell(f"Not installed: {error}.")
        else:
            part.rows += [told] if told else []
        gc.collect()
    _summed_up(part)
    return part


_DEFINITIONS = {
    "largest": "share of the parameters in the largest layer.",
    "left whole": "modules with others inside that were not inlined.",
    "runs": "of the model, for the conversion and its check.",
    "forwards": "time of the processor for the conversion and its check, in forwards of the plain "
    "model; s: in seconds.",
    "batch": "sizes of micro-batches that the layers take.",
    "equal": "outputs, gradients, buffers and parameters after a step of AdamW (eps 1e-4) in pipes "
    "of two and of three stages, with micro-batches of 3 and 2, and outputs in evaluation with 2 "
    "and 1, and those of the plain model on the same micro-batches; verified: the same of a model "
    "that draws random numbers, by `syncpipe.verify` on one micro-batch.",
}


def _summed_up(part: Part) -> None:
    """The targets of a table."""
    good = [row for row in part.rows if "layers" in row]
    if not good:
        return
    equal = [row for row in good if row.get("equal") in _WORDS.values()]
    runs, times = ([row[name] for row in good] for name in ("runs", "forwards"))
    share, median = len(good) / len(part.rows), statistics.median(times)
    part.aim("97 % convert", share >= 0.97, f"{len(good)} of {len(part.rows)}")
    part.aim("all are equal", equal == good, f"{len(equal)} of {len(good)}")
    part.aim("at most 20 runs", max(runs) <= 20, f"{statistics.median(runs)}, at most {max(runs)}")
    part.aim("a median of 60 forwards", median <= 60, f"{median}, at most {max(times)}")


GROUP = Group(
    "converted",
    "Converted models",
    {package or "written": partial(run, package) for package in PACKAGES},
    versions=[package for package in PACKAGES if package],
)
