"""Decides which modules of a model are leaves, called as they are, and which are inlined.

A module is inlined if what its forward does can be written down: if traces of other runs, also of
other sizes, are the same, line by line. Otherwise it stays a leaf, so that its own code decides as
ever. That costs layers, not truth. What holds most of the model has to be inlined, or there would
be nothing to cut: there, what Python decided by becomes a guard, and a size that matters must be
that of the sample. Training and evaluation are traced each by itself.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from types import TracebackType
from typing import Any, NamedTuple, Self
from unittest.mock import Mock

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from syncpipe.data import described
from syncpipe.layers.conversion.signature import Signature
from syncpipe.layers.conversion.trace import (
    Call,
    Fault,
    Objects,
    Tracer,
    guard,
    leaves_of,
    map_tree,
)
from syncpipe.layers.time_first import is_time_first, time_first_message
from syncpipe.runtime.random_numbers import is_compiled
from syncpipe.state import State

__all__ = ["HOOKS", "LAYERS", "Progress", "Traced", "Whole", "traced"]

#: Where ``nn.Module`` keeps hooks; those of its forward and backward come first.
HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
#: PyTorch's own, which take faster ways in evaluation, or are looked for by their class.
LAYERS = (
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention, _NormBase,
)  # fmt: skip
_STATE_METHODS = ("get_extra_state", "set_extra_state", "_save_to_state_dict")


class Whole(NamedTuple):
    """A module with others inside that is called as it is: a layer cannot begin in it.

    Attributes:
        path: of the module.
        line: of its code, where that is why; otherwise empty.
        reason: in words.
    """

    path: str
    line: str
    reason: str


class Traced(NamedTuple):
    """A model of which it is known what it does.

    Attributes:
        training: the trace of the sample in training.
        evaluation: that in evaluation.
        whole: the modules that were not inlined though they have others inside.
        unlike: samples of other sizes with which the model decided otherwise somewhere.
        notes: what the user should know.
    """

    training: Tracer
    evaluation: Tracer
    whole: list[Whole]
    unlike: list[list[Tensor]]
    notes: list[str]


def traced(
    model: nn.Module, signature: Signature, tensors: list[Tensor], progress: Progress
) -> Traced:
    """Runs a model until it is known which of its modules can be inlined.

    Args:
        model: the model.
        signature: of its forward; learns which sizes must be those of the sample.
        tensors: of the sample.
        progress: counts the runs.

    Raises:
        ValueError: the model cannot be converted; with the line that is in the way.
    """
    return _Inliner(model, signature, tensors, progress).settled()


class Progress:
    """A progress bar (or a plain line, without tqdm) for what takes longer than two seconds."""

    def __init__(self, name: str) -> None:
        self._name, self._start, self.count = name, time.monotonic(), 0
        self._bar: Any = None

    def step(self) -> None:
        """Counts one run of the model."""
        self.count += 1
        if self._bar is None and time.monotonic() - self._start > 2:
            self._bar = _bar(f"sequential({self._name})", self.count)
        if self._bar is not None:
            self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(name: str, count: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        print(f"{name} runs the model with its sample, up to 20 times ...", file=sys.stderr)
        return Mock()
    return tqdm(desc=name, total=20, initial=count - 1, unit="run", leave=False, disable=None)


#: Dimensions, each as the index of a tensor and of its dimension, with other sizes for them.
_Sizes = dict[tuple[int, int], int]


class _Inliner:
    def __init__(
        self, model: nn.Module, signature: Signature, tensors: list[Tensor], progress: Progress
    ) -> None:
        self.model, self.signature, self.tensors = model, signature, tensors
        self.name, self.progress, self.objects = type(model).__name__, progress, Objects()
        self.paths = {module: path for path, module in model.named_modules()}
        self.own = [*model.parameters(), *model.buffers()]
        self.leaves: dict[str, tuple[str, str]] = {}
        for module, path in self.paths.items():
            if path and (reason := _must_be_leaf(module)):
                self.leaves[path] = "", reason
        self._refuse_root()
        self.counts = Counter(
            path[:end]
            for path, module in model.named_modules()
            if module._parameters
            for end in {0, *(k for k, c in enumerate(path) if c == "."), len(path)}
        )
        self._refused: set[Any] = set()  # sizes that the model itself refuses

    def settled(self) -> Traced:
        self._try()  # what is made in the first run only is made now
        while True:
            self.unlike: list[list[Tensor]] = []
            self.notes: list[str] = []
            self.pinned: list[Fault] = []  # why the batch size must be that of the sample
            state = State({"": self.model}, self.own, objects=False)
            self.runs = {training: self._run(training, self.tensors) for training in (True, False)}
            faults = [fault for run in self.runs.values() for fault in run.faults]
            faults += [
                (node.meta["owner"], node.meta["line"], "Python decides by a size or a value")
                for run in self.runs.values()
                for node in run.live
                if node.target is guard and not self._holds_most(node.meta["owner"])
            ]
            faults += self._changed(state)
            if not self._leave(faults or self._repeat() or self._vary()):
                break
        if self.pinned:
            at = "".join(f"\n  {line or what}" for _, line, what in self.pinned[:3])
            self.notes.append(
                f"{self.name} was converted for batches of {self.signature.batch} only, so a "
                "Pipe must cut each mini-batch into micro-batches of this size. The model does "
                f"something else with others, here:{at}"
            )
        whole = [
            Whole(path, *why)
            for path, why in self.leaves.items()
            if self.model.get_submodule(path)._modules
            and not any(path.startswith(f"{outer}.") for outer in self.leaves)
        ]
        return Traced(self.runs[True], self.runs[False], whole, self.unlike, self.notes)

    def _try(self) -> None:
        self.progress.step()
        try:
            args, kwargs = self.signature.call(self.tensors)
            self.model.train()(*args, **kwargs)
        except Exception as error:
            sample = self.signature.shown(self.tensors)
            raise ValueError(
                f"{self.name} itself, called with the sample ({sample}), raises "
                f"{type(error).__name__}: {error}"
            ) from error

    def _run(self, training: bool, tensors: list[Tensor]) -> Tracer:
        self.progress.step()
        self.model.train(training)
        names = self.signature.names
        tracer = Tracer(self.model, self.leaves, self.paths, names, self.objects)
        return tracer.run(*self.signature.call(tensors))

    def _leave(self, faults: list[Fault]) -> bool:
        """Makes the modules at fault leaves; whether there are any.

        Raises:
            ValueError: only modules that hold most of the model are at fault.
        """
        small = self._small(faults)
        for owner, line, what in small:
            self.leaves.setdefault(owner, (line, what))
        if small or not faults:
            return bool(small)
        owner, line, what = faults[0]
        name = type(self.model.get_submodule(owner)).__name__
        at = f" ({owner})" if owner else ""
        where = f":\n  {line}\n" if line else ". "
        raise ValueError(
            f"{name}{at} cannot be cut into layers, {what}{where}{self._remedy(what, line)}"
        )

    def _remedy(self, what: str, line: str) -> str:
        model, config = self.model, getattr(self.model, "config", None)
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            return (
                "Prefix and prompt tuning hand their prefix to all layers in a cache: take "
                "adapters that sit in the layers (LoraConfig, IA3Config)"
            )
        if "Cache" in what:
            return (
                "A cache is one object that all layers write into, and training needs none: call "
                f"{self.name} with use_cache=False, or set model.config.use_cache = False"
            )
        if getattr(config, "layerdrop", 0):
            return (
                "Layers that are dropped at random cannot be cut: set layerdrop=0.0 in the config, "
                "and make the model of that"
            )
        if "mask_hidden_states" in line and getattr(config, "apply_spec_augment", False):
            return (
                "Masks that training draws cannot be cut: set model.config.apply_spec_augment = "
                "False"
            )
        return (
            "Move this into a module of its own (which is kept as one layer), or convert the "
            "modules in it one by one"
        )

    def _holds_most(self, path: str) -> bool:
        """Whether too little would be left of the model if this module were a leaf."""
        return not path or 2 * self.counts[path] > self.counts[""]

    def _small(self, faults: list[Fault]) -> list[Fault]:
        """The faults of modules that can be leaves."""
        return [fault for fault in faults if not self._holds_most(fault[0])]

    def _changed(self, state: State) -> Iterator[Fault]:
        """What the forward of a module that is inlined sets, or puts into a place of its own."""
        for kind, name in state.changes():
            ways = [path for path in self.paths.values() if name.startswith(f"{path}.")]
            path = max(ways, key=len, default="")
            inside = any(path == leaf or path.startswith(f"{leaf}.") for leaf in self.leaves)
            own = name.removeprefix(f"{path}.")
            if kind != "generator" and own != "training" and not inside:
                yield path, "", f"its forward sets the attribute {own}"

    # Other runs

    def _repeat(self) -> list[Fault]:
        """What differs from run to run, of the very same sample."""
        again = [(run, self._run(mode, self.tensors)) for mode, run in self.runs.items()]
        return [fault for one, other in again for fault in differences(one, other)]

    def _vary(self) -> list[Fault]:
        """Runs other sizes; the faults of modules that can be leaves instead.

        Sizes that could not be varied are those of the sample in every call. The batch is varied in
        both modes. The others are varied one by one in evaluation, and then at once in training.
        """
        free: dict[frozenset[tuple[int, int]], _Sizes] = {}
        found: list[Fault] = []
        for k, group in enumerate(self._groups()):
            if any(group <= other for other in free):
                continue
            pinned: list[Fault] = []
            for sizes in self._others(group, is_batch=not k):
                modes = (True, False) if not k else (False,)
                tried = [self._tried(training, sizes, is_batch=not k) for training in modes]
                if None in tried:
                    continue  # the model itself refuses this size
                faults = [fault for faults in tried for fault in faults or ()]
                found += self._small(faults)
                if self._small(faults) == faults:
                    free[group] = sizes
                    break
                pinned += faults
                self.unlike.append(self._resized(sizes))
            self.pinned += pinned if not k and group not in free else []
        lengths = [group for group in free if not (group & self._batch())]
        at_once = {at: size for group in lengths for at, size in free[group].items()}
        if lengths and self._tried(True, at_once) != []:
            for group in lengths:  # one by one, then
                tried_alone = self._tried(True, free[group])
                found += self._small(tried_alone or [])
                if tried_alone is None or self._small(tried_alone) != tried_alone:
                    del free[group]
        if not found:
            for k, shape in enumerate(self.signature.shapes):
                for d in range(len(shape)):
                    shape[d] = None if any((k, d) in group for group in free) else shape[d]
        return found

    def _tried(self, training: bool, sizes: _Sizes, *, is_batch: bool = False) -> Any:
        """The faults that come to light with other sizes; None: the model refuses them."""
        key = training, frozenset(sizes.items())
        if key in self._refused:
            return None
        base, tensors = self.runs[training], self._resized(sizes)
        try:
            other = self._run(training, tensors)
        except Exception:
            self._refused.add(key)
            return None
        faults = [*differences(base, other), *other.faults]
        if is_batch and not self._small(faults):
            _check_outputs(self.name, base.result, other.result, tensors, self.tensors)
        if is_batch and not faults:
            self.notes = list(self._time_cut(base, other))
        return faults

    def _time_cut(self, base: Tracer, other: Tracer) -> Iterator[str]:
        """What to say of modules that take time in dimension 0 and are given the batch there."""
        calls = ([n for n in run.root.nodes() if n.op == "call_module"] for run in (base, other))
        for one, two in zip(*calls, strict=True):
            module = self.model.get_submodule(str(one.target))
            if is_time_first(module):
                a, b = (node.all_input_nodes[0].meta["value"] for node in (one, two))
                if a.dim() == 3 and a.shape[0] != b.shape[0] and a.shape[1] == b.shape[1]:
                    yield time_first_message(
                        str(one.target), module, a, "the batch of the sample is in dimension 0"
                    )

    def _batch(self) -> frozenset[tuple[int, int]]:
        """The dimensions that have the batch."""
        return frozenset((k, 0) for k, is_cut in enumerate(self.signature.is_cut) if is_cut)

    def _groups(self) -> list[frozenset[tuple[int, int]]]:
        """Dimensions of tensors that may have to change together: the batch, then those alike."""
        cut = self._batch()
        sizes: dict[Any, set[tuple[int, int]]] = {}
        for k, tensor in enumerate(self.tensors):
            for d, size in enumerate(tensor.shape):
                if (k, d) not in cut and size > 1:
                    sizes.setdefault(size, set()).add((k, d))
                    sizes.setdefault((d, size), set()).add((k, d))
        return list(dict.fromkeys([cut, *map(frozenset, sizes.values())]))

    def _others(self, group: frozenset[tuple[int, int]], *, is_batch: bool) -> Iterator[_Sizes]:
        k, d = next(iter(group))
        size = self.tensors[k].shape[d]
        for other in [1, 2 * size, size + 1] if is_batch else [size // 2, 2 * size]:
            if other not in (0, size):
                yield dict.fromkeys(group, other)

    def _resized(self, sizes: _Sizes) -> list[Tensor]:
        """The sample with other sizes: its entries again, or fewer of them."""
        tensors = list(self.tensors)
        for (k, d), size in sizes.items():
            repeats = -(-size // tensors[k].shape[d])
            tensors[k] = torch.cat([tensors[k]] * repeats, d).narrow(d, 0, size)
        return tensors

    def _refuse_root(self) -> None:
        model = self.model
        hooks = [name for name in HOOKS[:4] if getattr(model, name)]
        if hooks:
            raise ValueError(
                f"{self.name} has hooks ({', '.join(hooks)}), which its layers would "
                "not run: remove them, or register them on the modules in it"
            )
        for mode in (True, False):
            model.train(mode)
            for path, module in model.named_modules():
                if module.training is not mode:
                    raise ValueError(
                        f"{self.name}.train({mode}) leaves {path!r} in the other mode, "
                        "which train() of its layers would not: write that into the train() of "
                        "the module itself"
                    )


def _check_outputs(
    name: str, result: Any, varied: Any, tensors: list[Tensor], sample: list[Tensor]
) -> None:
    """Refuses outputs of which the batch is not dimension 0: they could not be concatenated.

    Raises:
        ValueError: such an output, and what helps.
    """
    here, there = leaves_of(result), leaves_of(varied)
    sizes = {(len(a), len(b)) for a, b in zip(sample, tensors, strict=True) if a.dim()}
    n, m = next(pair for pair in sizes if pair[0] != pair[1])
    for k, (a, b) in enumerate(zip(here, there, strict=False)):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() == b.dim() > 0):
            continue
        follows = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
        if follows == [0] and a.shape[0] * m == b.shape[0] * n:
            continue
        what = (
            f"the batch in dimension {' and '.join(map(str, follows))}" if follows else "no batch"
        )
        raise ValueError(
            f"output {k} of {name} is {described(a)} for a batch of {n} and {described(b)} for one "
            f"of {m}: it has {what}, and outputs of micro-batches are put together along dimension "
            "0. Let the model return it with the batch in dimension 0 (transposed, or expanded), "
            "leave it out, or compute it of the outputs (a matrix of all samples with all others, "
            "in the loss)"
        )


# Comparing two traces


def differences(a: Tracer, b: Tracer) -> list[Fault]:
    """Where two traces of a model differ: for each call of a module the first line that does."""
    found: list[Fault] = []
    live = a.live | b.live
    doubtful: list[Any] = []  # calls that differ: what they gave may differ as well

    def line(entry: fx.Node | Call | None) -> str:
        if isinstance(entry, Call):
            return entry.owner
        return "" if entry is None else f"{entry.op} {entry.target!r} {shown(entry)}"

    def shown(node: fx.Node) -> str:
        return repr(map_tree(value, (node.args, node.kwargs)))

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        key = leaf.meta["key"]
        return f"%{next((call for call in doubtful if key[: len(call)] == call), key)}"

    def compare(one: Call, two: Call) -> None:
        entries = ([e for e in c.entries if isinstance(e, Call) or e in live] for c in (one, two))
        for left, right in zip_longest(*entries):
            if line(left) != line(right):
                node = left if isinstance(left, fx.Node) else right
                at = node.meta["line"] if isinstance(node, fx.Node) else ""
                found.append((one.owner, at, _reason(left, right)))
                doubtful.append(one.key)
                return
            if isinstance(left, Call) and isinstance(right, Call):
                compare(left, right)

    compare(a.root, b.root)
    outputs = (repr(map_tree(value, trace.output)) for trace in (a, b))
    if not found and len(set(outputs)) > 1:
        found.append(("", "", "what the model returns is put together differently"))
    return found


def _reason(one: fx.Node | Call | None, two: fx.Node | Call | None) -> str:
    """What differs, in words."""
    if one is None or two is None:
        return "more is done in one call than in another"
    if isinstance(one, Call) or isinstance(two, Call):
        return "another module is called"
    for a, b in zip(one.all_input_nodes, two.all_input_nodes, strict=False):
        if a.meta["key"][0] == b.meta["key"][0] == "object" and a.target != b.target:
            return f"it passes a {type(a.meta['value']).__name__} that is made anew in every call"
    names = [each.target if isinstance(each.target, str) else each.target.__name__
             for each in (one, two)]  # fmt: skip
    if names[0] != names[1]:
        return f"another thing is done from time to time ({', '.join(names)})"
    return f"what it passes to {names[0]} depends on sizes, or differs from call to call"


# What is asked of modules


def _must_be_leaf(module: nn.Module) -> str:
    """Why a module is more than its forward and its children; empty if it is not."""
    kind = type(module)
    if not module._modules and not isinstance(module, _CONTAINERS):
        return "it has no modules inside"
    if isinstance(module, LAYERS):
        return "PyTorch's layer takes a faster way in evaluation, or is looked for by its class"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if getattr(kind, "_syncpipe_skips_are_internal", False) or getattr(
        kind, "_syncpipe_skippable", False
    ):
        return "it is a Pipe, or has skips of its own"
    if any(getattr(module, name, None) for name in HOOKS):
        return "it has hooks"
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in _STATE_METHODS):
        return "it saves a state of its own"
    if is_compiled(module) or "forward" in vars(module):
        return "it is compiled, or its forward was replaced"
    if hasattr(module, "parametrizations"):
        return "it is parametrized"
    if any(base.__name__ == "BaseTunerLayer" for base in kind.__mro__):
        return "it is an adapter of peft"
    return ""
