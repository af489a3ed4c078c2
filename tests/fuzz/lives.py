"""Lives: a pipe and the plain model go through one event after another, side by side.

A life is a program: ``Life(...)``, and calls of its methods, the events. Each does the same to the
pipe and to the plain model, and compares all that one can see of both. So what fails prints as a
few lines that run as they stand: events that are not needed for it are left out first.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from syncpipe import Pipe, inline
from tests.fuzz.cases import ALIKE, Call, Case
from tests.fuzz.models import KINDS, TABLE, Chain, Model, drawn_model, leaves
from tests.fuzz.runs import (
    Place,
    batch,
    in_one_stage,
    is_raised_by_torch,
    own_gradients,
    run_pipe,
    run_plain,
    schedule_of,
    step,
    to_rounding,
)
from tests.support.compare import assert_same
from tests.support.interrupts import interrupted
from tests.support.models import weigh
from tests.support.running import another_thread, in_threads
from tests.support.training import fitting

__all__ = ["Life", "Story", "check", "drawn_story", "shrunk"]

#: Kinds that are not drawn: what a backward draws depends on the balance, and a leaf that only a
#: function knows is not copied with it.
_LEFT_OUT = {"noisy_hook", "noisy_parameter_hook", "fork_rng_hook", "closure", "own_forward"}
#: Those that an evaluation in another thread changes, too.
_IN_EVAL = {"counter", "two_counters", "late", "center", "send_kept", "counted", "remembered"}
_IN_EVAL |= {"makes", "makes_module", "table", "embedding_max_norm"}
#: What a pipe may refuse, by the kinds of layers.
_REFUSED = dict.fromkeys(("counted", "remembered"), "when it was recomputed")


class Failure(Exception):
    """What a layer raises."""


class Life:
    """A pipe and the plain model.

    Args:
        layers: kinds of layers.
        balance: layers of each stage.
        devices: for each stage the number of its worker.
        chunks, checkpoint: of the pipe.
        seed: of the parameters.
        ties: as a ``Model`` has them.
        optimizer: one that is made before the pipe.
    """

    def __init__(
        self,
        *layers: str,
        balance: Sequence[int],
        devices: Sequence[int],
        chunks: int = 1,
        checkpoint: Any = "never",
        seed: int = 0,
        ties: tuple[tuple[int, int, bool], ...] = (),
        optimizer: str = "",
    ) -> None:
        self.model, self.k = Model(layers, seed, ties), 0
        model, self.plain = self.model.build(), self.model.build()
        self._handles: list[tuple[Any, Any]] = []
        self._hooked = False
        self._optimizers: tuple[Any, Any] | None = None
        if optimizer:
            self._optimizers = _optimizer(optimizer, model), _optimizer(optimizer, self.plain)
        self.pipe = Pipe(
            model, balance, devices=_workers(devices), chunks=chunks, checkpoint=checkpoint
        )
        self._known = self._parameters()

    # --- events: calls ---------------------------------------------------------------------------

    def call(
        self,
        driver: str,
        size: int = 4,
        loss: str = "mean",
        autocast: str = "",
        computed: bool = False,
        under: str = "",
    ) -> None:
        """A call, alone or ``under`` something that is there meanwhile."""
        call, case = self._call(driver, size, loss, autocast, computed)
        made = schedule_of(self.pipe, call)
        rounded = to_rounding(case, call, made)

        def run() -> Any:
            torch.manual_seed(self.k)
            found = run_pipe(self.pipe, case, call, self.k, Place())
            return found if not self.model.draws else replace(found, output=_and_state(found))

        try:
            with self._meanwhile(under):
                found = in_threads(lambda _: run(), 0)[0] if under == "thread" else run()
        except (RuntimeError, ValueError) as error:
            plain = partial(self._plainly, call, case, made)
            if not self._may_refuse(error) and not is_raised_by_torch(error, plain):
                raise
            self._follow()
            return
        wanted = self._plainly(call, case, made)
        own_gradients(self.plain)
        coarse = autocast or "autocast" in self.model.layers
        tolerance = 0.3 if coarse and "weighted" in loss else 0.1 if coarse else 1e-4
        assert_same(found, wanted, "the call's ", rounded=rounded, rtol=tolerance, atol=tolerance)
        if rounded:
            self._follow()
        self._compare()

    def fail(self, k: int, when: str, at: int, driver: str = "train", size: int = 4) -> None:
        """Layer ``k`` raises in the forward or backward of its call ``at``, or Ctrl-C comes."""
        call, case = self._call(driver, size)
        before = self._gradients()
        torch.manual_seed(self.k)
        if when == "interrupt":  # which may come after all is done
            x = batch(size, self.k, False)
            with suppressed(self._may_refuse):
                interrupted(at, lambda: self.pipe.train_batch(x, loss_fn=weigh))
            self._follow()
            return
        handle = self.pipe[k].register_forward_hook(_raising(when, at))
        try:
            with suppressed(self._may_refuse):
                run_pipe(self.pipe, case, call, self.k, Place())
        except Failure:
            if driver == "train":
                after = {name: grad for name, grad in self._gradients().items() if name in before}
                assert_same(after, before, "gradients after an error ")
        finally:
            handle.remove()
        self._follow()

    # --- events: training ------------------------------------------------------------------------

    def optimizer(self, kind: str) -> None:
        """Makes an optimizer of all parameters."""
        self._optimizers = _optimizer(kind, self.pipe), _optimizer(kind, self.plain)

    def step(self) -> None:
        """A step of the optimizer, or a plain one."""
        for module, optimizer in zip(self._both, self._optimizers or (None, None), strict=True):
            step(module) if optimizer is None else optimizer.step()
        self._compare()

    def zero(self, set_to_none: bool = True) -> None:
        """Forgets gradients."""
        for module in self._both:
            for leaf in leaves(module).values():
                leaf.grad = None if set_to_none or leaf.grad is None else leaf.grad.zero_()

    def flatten(self, what: str) -> None:
        """The pipe's parameters, or their gradients, become parts of one tensor."""
        known = [p for p in self.pipe.parameters() if p.requires_grad]
        if not known:
            return
        flat = torch.cat([p.detach().flatten() for p in known])
        parts = flat.split([p.numel() for p in known])
        for p, part in zip(known, parts, strict=True):
            if what == "parameters":
                p.data = part.view_as(p)
            else:
                p.grad = part.zero_().view_as(p)
        if what == "gradients":
            for p in self.plain.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad else p.grad

    # --- events: settings ------------------------------------------------------------------------

    def set(self, name: str, value: Any) -> None:
        """Sets an attribute of the pipe; what is refused changes nothing."""
        asked = _workers(value) if name == "devices" else value
        before = self._settings()
        try:
            setattr(self.pipe, name, asked)
        except (ValueError, IndexError):
            assert self._settings() == before
        self._compare()
        try:
            schedule_of(self.pipe, self._call("train", 4)[0])
        except ValueError:  # it does not fit these devices
            self.pipe.schedule = "1f1b"

    def mode(self, k: int | None, training: bool) -> None:
        """``train()`` or ``eval()`` of a layer, or of the whole."""
        for module in self._both:
            (module if k is None else module[k]).train(training)
        self._compare()

    def freeze(self, k: int, requires_grad: bool) -> None:
        """``requires_grad_`` of a layer."""
        for module in self._both:
            module[k].requires_grad_(requires_grad)

    def change(self, k: int, factor: Any) -> None:
        """Another attribute of a layer, if it has one; a list becomes a tensor."""
        for module in self._both:
            for layer in module[k].modules():
                if hasattr(layer, "factor"):
                    layer.factor = torch.tensor(factor) if isinstance(factor, list) else factor

    def hook(self, k: int, kind: str) -> None:
        """A hook on a layer, or on its parameters."""
        if any(map(_unhookable, self.model.layers)):
            return
        handles = [_hook(module[k], kind) for module in self._both]
        self._handles.extend(zip(*handles, strict=True))
        self._hooked = True

    def unhook(self) -> None:
        """Removes the last hook."""
        for handle in self._handles.pop() if self._handles else ():
            handle.remove()

    # --- events: layers --------------------------------------------------------------------------

    def replace(self, k: int, kind: str, how: str) -> None:
        """Another layer, put there in one of the ways that there are."""
        names = (*self.model.layers[:k], kind, *self.model.layers[k + 1 :])
        if "Send" in repr(self.plain[k]) or "Receive" in repr(self.plain[k]):
            return
        if not Chain.takes(names) or (self._hooked and _unhookable(kind)):
            return
        through = [tie for tie in self.model.ties if k in tie[:2]]  # the others stay tied
        others = sorted({j for tie in through for j in tie[:2]} - {k})
        whole = all(tie[2] for tie in through)
        ties = (
            *(tie for tie in self.model.ties if tie not in through),
            *((first, second, whole) for first, second in pairwise(others)),
        )
        made = Model((kind,), self.model.seed + self.k + 1)
        new, other = made.build(), made.build()
        for module in (new, other):
            module.train(self.plain.training)
        try:
            _put(self.pipe, k, new[0], how)
        except (ValueError, TypeError, RuntimeError):
            assert how not in ("index", "name")
            self._compare()
            return
        self.plain[k] = other[0]
        self.model = replace(self.model, layers=names, ties=ties)
        self._compare(known=False)

    def load(self, seed: int, assign: bool) -> None:
        """Values of another model with these layers."""
        other = replace(self.model, seed=seed).build().state_dict()
        for module in self._both:
            state = {key: copy.deepcopy(value) for key, value in other.items()}
            module.load_state_dict(state, assign=assign, strict=False)
        if assign:  # what they are told of are the parameters of before
            self._optimizers = None
        self._compare(known=not assign)

    def copy(self, how: str) -> None:
        """Goes on with copies. Those of gradients, and an optimizer, stay behind."""
        with suppressed(lambda error: "parametrized" in str(error)):  # which PyTorch refuses
            self.plain = _copied(self.plain, how)
            self.pipe = _copied(self.pipe, how)
        self.zero()
        self._optimizers, self._handles = None, []
        self._compare(known=False)

    def end(self) -> None:
        """A call takes no more Python than one of a fresh pipe, and copies nothing that is large.

        Both have seen these layers twice, so that what they learned of earlier calls is forgotten.
        """
        pipe, taken = self.pipe, []
        fresh = Pipe(
            pipe[:], pipe.balance, devices=pipe.devices, replicas=pipe.replicas,
            chunks=pipe.chunks, checkpoint=pipe.checkpoint, schedule=pipe.schedule,
        )  # fmt: skip
        fresh.training = pipe.training
        with suppressed(self._may_refuse), inline():
            for one in (fresh, pipe, fresh):  # what layers do may change from call to call
                run = partial(one.train_batch, batch(6, 0, False), loss_fn=weigh, verify=False)
                with _Large(pipe) as large:
                    run(), run()
                    large.made = 0
                    run()
                for new, old in zip(fresh._build().stages, pipe._build().stages, strict=True):
                    for stage in _pieces(new):  # a lock that threads may need since then
                        stage.changes.needs_lock |= any(
                            piece.changes.needs_lock for piece in _pieces(old)
                        )
                taken.append((large.made, min(_python_calls(run) for _ in range(2))))
            most = max(taken[0], taken[2])
            assert taken[1] <= most, f"(copies, calls): {taken[1]}, of a fresh pipe {most}"
            assert taken[1][0] == 0

    # --- how -------------------------------------------------------------------------------------

    @property
    def _both(self) -> tuple[Any, Any]:
        return self.pipe, self.plain

    def _call(
        self, driver: str, size: int, loss: str = "mean", autocast: str = "", computed: bool = False
    ) -> tuple[Call, Case]:
        """A call, and the pipe as it is now, in words."""
        self.k += 1
        pipe = self.pipe
        sizes = (size,) * (pipe.chunks if driver == "iterator" else 1)
        call = Call(driver, None, loss, sizes, autocast, False, computed, None)
        stages, copies = len(pipe.balance), tuple(pipe.replicas)
        case = Case(
            self.model, tuple(pipe.balance), (0,) * stages, copies, pipe.chunks, pipe.checkpoint,
            False, True, (call,),
        )  # fmt: skip
        return call, case

    def _plainly(self, call: Call, case: Case, made: Any) -> Any:
        """The call of the plain model; where layers draw, of a fresh pipe of one stage."""
        modes = {module: module.training for module in self.plain.modules()}
        try:
            if not self.model.draws:
                if call.driver in ("eval", "outputs"):
                    self.plain.eval()
                return run_plain(case, self.plain, call, self.k, made)
            whole = (len(self.plain),)
            alone = Pipe(self.plain, whole, devices=["cpu:0"], chunks=case.chunks)
            alone.checkpoint = "never"
            order = None if made is None else partial(in_one_stage, made)
            case = replace(case, balance=whole, devices=(0,), replicas=(1,))
            torch.manual_seed(self.k)
            found = run_pipe(alone, case, replace(call, schedule=order), self.k, Place())
            return replace(found, output=_and_state(found))
        finally:
            # As evaluations of a pipe do: so what a layer has made meanwhile has its mode.
            for module, mode in [*modes.items()] * 2:
                if module.training != mode:
                    module.train(mode)

    def _meanwhile(self, what: str) -> AbstractContextManager[Any]:
        if what == "inline":
            return inline()
        if what == "profiler":
            return torch.autograd.profiler.profile(use_kineto=False)
        if what == "tracer":
            return _profiled()
        if what == "evaluation" and not {*self.model.layers} & _IN_EVAL and not self.model.draws:
            return another_thread(lambda: self.pipe.eval_batch(batch(2, 0, False)))
        if what == "draws" and not self.model.draws:
            return another_thread(partial(torch.rand, ()))
        return nullcontext()

    def _may_refuse(self, error: BaseException) -> bool:
        """Whether an error is what a pipe is to say of such layers, and no defect."""
        if "there is nothing to train" in str(error):
            return True
        if max(self.pipe.replicas) > 1 and not {*self.model.layers} <= {*ALIKE}:
            return "replica" in str(error)
        kinds = {*self.model.layers} & {*_REFUSED}
        return any(_REFUSED[kind] in str(error) for kind in kinds)

    def _settings(self) -> dict[str, Any]:
        names = ("balance", "devices", "replicas", "chunks", "checkpoint", "schedule", "slots")
        return {name: getattr(self.pipe, name) for name in names}

    def _parameters(self) -> list[int]:
        return [id(parameter) for parameter in self.pipe.parameters()]

    def _gradients(self) -> dict[str, Any]:
        found = {name: leaf.grad for name, leaf in leaves(self.pipe).items()}
        return {name: None if grad is None else grad.clone() for name, grad in found.items()}

    def _compare(self, known: bool = True) -> None:
        """All that one can see of both between calls."""
        ours, theirs = (_visible(module) for module in self._both)
        assert_same(ours, theirs, "after the event, ")
        if known and not any("makes" in kind for kind in self.model.layers):
            assert self._parameters() == self._known, "parameters are other objects"
        self._known = self._parameters()

    @torch.no_grad()
    def _follow(self) -> None:
        """The plain model becomes what the pipe is, after errors and what is equal to rounding."""
        memory: dict[int, Tensor] = {}
        pairs = zip(self.pipe[:].modules(), self.plain.modules(), strict=True)
        for ours, theirs in islice(pairs, 1, None):
            for kind in ("_parameters", "_modules"):
                mine, other = getattr(ours, kind), getattr(theirs, kind)
                for name in mine.keys() - other.keys():  # what the layer made in its forward
                    other[name] = copy.deepcopy(mine[name])
                for name in other.keys() - mine.keys():
                    del other[name]
            for name, value in vars(ours).items():
                if isinstance(value, int | float):
                    setattr(theirs, name, value)
                elif isinstance(value, Tensor):
                    setattr(theirs, name, value.clone())
            for name, buffer in ours._buffers.items():
                if buffer is not None:
                    theirs._buffers[name] = memory.setdefault(id(buffer), buffer.clone())
        others = leaves(self.plain)
        for name, leaf in leaves(self.pipe).items():
            others[name].copy_(leaf)
            others[name].grad = None if leaf.grad is None else leaf.grad.clone()


def _pieces(stage: Any) -> list[Any]:
    """A stage, and its pieces that are recomputed by themselves."""
    return [stage, *[piece for piece, _ in stage._units[1]]]


def _workers(devices: Sequence[int]) -> list[str]:
    return [f"cpu:{k}" for k in devices]


def _optimizer(kind: str, module: nn.Module) -> Any:
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return None
    if kind == "adam":
        return torch.optim.AdamW(parameters, lr=1e-3)
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _and_state(found: Any) -> Any:
    return found.output, torch.get_rng_state()


def _visible(module: nn.Module) -> dict[str, Any]:
    """Values, modes and flags, by name; without what a pipe has beside its layers."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {
        "keys": [*module.state_dict()],
        "parameters": {name: p.detach() for name, p in parameters.items()},
        "gradients": {name: p.grad for name, p in parameters.items()},
        "trained": {name: p.requires_grad for name, p in parameters.items()},
        "buffers": dict(module.named_buffers()),
        "modes": {name: layer.training for name, layer in module.named_modules()},
    }


def _hook(layer: nn.Module, kind: str) -> list[Any]:
    if kind == "forward":
        return [layer.register_forward_hook(lambda m, x, y: y * 1.25)]
    if kind == "backward":
        return [layer.register_full_backward_hook(lambda m, gx, gy: None)]
    known = [p for p in layer.parameters() if p.requires_grad]
    return [p.register_hook(lambda g: None if g is None else g * 0.5) for p in known]


def _unhookable(kind: str) -> bool:
    """Whether it gives a tree, or what a backward hook gives must not be written into."""
    trees = ("fork", "twice", "weighs", "center")
    return KINDS[kind].inplace or kind in trees or kind.startswith("send")


def _raising(when: str, at: int) -> Callable[..., None]:
    """A forward hook that raises in its call ``at``, or in the backward of what was given."""
    calls = itertools.count(1)

    def fail(*_: Any) -> None:
        if next(calls) == at:
            raise Failure

    def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
        if when == "forward":
            fail()
        elif (
            isinstance(output, Tensor)
            and output.requires_grad
            # Where a view was written into, PyTorch may crash here, in the plain model as well.
            and type(output.grad_fn).__name__ != "AsStridedBackward0"
        ):
            output.register_hook(fail)

    return hook


def _put(pipe: Pipe, k: int, layer: nn.Module, how: str) -> None:
    if how == "index":
        pipe[k] = layer
    elif how == "name":
        setattr(pipe, str(k), layer)
    elif how == "modules":
        pipe._modules[str(k)] = layer
    for partition in pipe.partitions if "partition" in how else ():
        if 0 <= k < len(partition) and how == "partition":
            partition[k] = layer
        elif 0 <= k < len(partition):
            partition._modules[[*partition._modules][k]] = layer
        k -= len(partition)


def _copied(module: nn.Module, how: str) -> Any:
    """A copy; functions and classes of tests, which cannot be pickled, are named by hand."""
    if how == "deepcopy":
        return copy.deepcopy(module)
    named: dict[int, Any] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, found: Any) -> int | None:
            if not isinstance(found, FunctionType | type):
                return None
            named[id(found)] = found
            return id(found)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, found: int) -> Any:
            return named[found]

    file = io.BytesIO()
    Pickler(file).dump(module)
    file.seek(0)
    return Unpickler(file).load()


def _python_calls(run: Callable[[], Any]) -> int:
    """How many functions of the package a call of this begins; no profiler, which pipes notice."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += frame.f_globals.get("__name__", "").startswith("syncpipe.")

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return count


@contextmanager
def _profiled() -> Iterator[None]:
    """Under a profiler of Python, which sees all that runs on the calling thread."""
    sys.setprofile(lambda *_: None)
    try:
        with inline():
            yield
    finally:
        sys.setprofile(None)


@contextmanager
def suppressed(may: Callable[[BaseException], bool]) -> Iterator[None]:
    """Lets no error pass that may be."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not may(error):
            raise


class _Large(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operators make that is as large as a ``TABLE``, in other memory than buffers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.module, self.made = module, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().nbytes() >= TABLE:
            there = {buffer.data_ptr() for buffer in self.module.buffers()}
            self.made += result.untyped_storage().data_ptr() not in there
        return result


# --- programs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Story:
    """A life in words."""

    layers: tuple[str, ...]
    begins: dict[str, Any]
    events: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...]

    def __str__(self) -> str:
        begins = {key: value for key, value in self.begins.items() if value or key == "balance"}
        lines = [f"life = Life({_arguments(self.layers, begins)})"]
        lines += [f"life.{name}({_arguments(*given)})" for name, *given in self.events]
        return "\n".join(lines)


def _arguments(positional: Any, named: Any) -> str:
    return ", ".join([*map(repr, positional), *[f"{k}={v!r}" for k, v in named.items()]])


def check(story: Story) -> None:
    """Lives it."""
    life = Life(*story.layers, **story.begins)
    for name, positional, named in story.events:
        getattr(life, name)(*positional, **named)


def _fails(story: Story, check: Callable[[Story], None]) -> str:
    """What a life fails by, if it does."""
    try:
        check(story)
    except Exception as error:
        return type(error).__name__
    return ""


def shrunk(story: Story, check: Callable[[Story], None] = check) -> Story:
    """The shortest life found that fails in the same way."""
    how = _fails(story, check)
    found = bool(how)
    while found:
        found = False
        for shorter in _shorter(story):
            if _fails(shorter, check) == how:
                story, found = shorter, True
                break
    return story


def _shorter(story: Story) -> Iterator[Story]:
    """Shorter ones: without events, with arguments by default, with plainer layers."""
    count = len(story.events)
    for size in (count // 2, count // 4, 1):
        for first in range(count - size, -1, -size) if size else ():
            events = story.events[:first] + story.events[first + size :]
            yield replace(story, events=events)
    for k, (name, positional, named) in enumerate(story.events):
        for key in named:
            fewer = {other: value for other, value in named.items() if other != key}
            changed = (name, positional, fewer)
            yield replace(story, events=(*story.events[:k], changed, *story.events[k + 1 :]))
    plain = {"checkpoint": "never", "ties": (), "optimizer": "", "seed": 0, "chunks": 2}
    for key, value in plain.items():
        if story.begins.get(key, value) != value:
            yield replace(story, begins={**story.begins, key: value})
    for k, kind in enumerate(story.layers):
        layers = (*story.layers[:k], "linear", *story.layers[k + 1 :])
        if kind != "linear" and Chain.takes(layers):
            yield replace(story, layers=layers)


def drawn_story(chance: random.Random) -> Story:
    """Draws a life of 5 to 15 events."""
    draws = chance.random() < 0.25
    kinds = [k for k in KINDS if k not in _LEFT_OUT | _OFF and (draws or not KINDS[k].draws)]
    alike = [k for k in ALIKE if k in kinds]
    model = drawn_model(chance, most=5, kinds=alike if chance.random() < 0.1 else kinds)
    count = len(model.layers)
    balance, devices = _placed(chance, count)
    begins = {
        "balance": balance,
        "devices": devices,
        "chunks": chance.randint(1, 4),
        "checkpoint": _checkpoint(chance, count),
        "seed": model.seed,
        "ties": model.ties,
        "optimizer": chance.choice(["", "", "sgd", "adam"]),
    }
    events = []
    for _ in range(chance.randint(5, 15)):
        events.append(_drawn_event(chance, chance.choice(_EVENTS), count, kinds))
        if events[-1][0] not in ("call", "fail", "step") and chance.random() < 0.7:
            events.append(_drawn_event(chance, "call", count, kinds))
    if "table" in model.layers or chance.random() < 0.3:
        events.append(("end", (), {}))
    return Story(model.layers, begins, tuple(events))


def _placed(chance: random.Random, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    stages = chance.randint(1, min(3, count))
    edges = [0, *sorted(chance.sample(range(1, count), stages - 1)), count]
    workers = chance.randint(1, stages)
    devices = [j % workers for j in range(stages)]
    balance = [b - a for a, b in pairwise(edges)]
    return tuple(balance), tuple(devices)


def _checkpoint(chance: random.Random, count: int) -> Any:
    layers = sorted(chance.sample(range(count), chance.randint(1, count)))
    return chance.choice(["never", "always", "always", "except_last", "offload", layers])


def _drawn_event(chance: random.Random, name: str, count: int, kinds: Sequence[str]) -> Any:
    pick, k = chance.choice, chance.randrange(count)
    flag = pick([True, False])
    if name == "call":
        drivers = ["forward", "train", "train", "iterator", "eval", "outputs", "no_grad"]
        often = {"loss": 0.3, "autocast": 0.1, "computed": 0.2, "under": 0.3}
        values = {
            "loss": pick(["sum", "weighted", "anew", "anew"]),
            "autocast": pick(["cached", "anew"]),
            "computed": True,
            "under": pick(["inline", "profiler", "tracer", "thread", "draws", "evaluation"]),
        }
        given = {key: value for key, value in values.items() if chance.random() < often[key]}
        return name, (pick(drivers),), {"size": chance.randint(1, 6), **given}
    if name == "fail":
        when = pick(["forward", "backward", "interrupt"])
        at = chance.randint(1, 2000 if when == "interrupt" else 4)
        return name, (k, when, at), {"driver": pick(["train", "train", "forward", "eval"])}
    balance, devices = _placed(chance, count)
    settings = {
        "chunks": chance.randint(1, 4),
        "checkpoint": _checkpoint(chance, count),
        "balance": balance,
        "devices": devices,
        "replicas": [chance.randint(1, 2) for _ in balance],
        "schedule": pick(fitting(devices)),
        "slots": pick([None, "textbook", "overlap", [2] * len(balance)]),
    }
    arguments: dict[str, tuple[Any, ...]] = {
        "set": pick([*settings.items()]),
        "zero": (flag,),
        "optimizer": (pick(["sgd", "adam"]),),
        "mode": (pick([None, k]), flag),
        "freeze": (k, flag),
        "change": (k, pick([0.5, 1.5, 2, [0.5], [1.5]])),
        "hook": (k, pick(["forward", "backward", "parameter"])),
        "replace": (k, pick(kinds), pick(_WAYS)),
        "load": (k, flag),
        "copy": (pick(["deepcopy", "pickle"]),),
        "flatten": (pick(["parameters", "gradients"]),),
    }
    return name, arguments.get(name, ()), {}


_EVENTS = [*["call"] * 6, "step", "step", "step", "zero", "optimizer", "set", "set", "mode"]
_EVENTS += ["freeze", "change", "change", "hook", "unhook", "replace", "replace", "load", "copy"]
_EVENTS += ["flatten", "fail"]
_WAYS = ["index", "name", "modules", "partition", "of partition"]
#: Kinds that wait for their mends: what layers keep, change and make.
_OFF: set[str] = set()
