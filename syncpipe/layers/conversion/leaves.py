"""Decides which modules of a model are leaves, called as they are, and which are inlined.

A module is inlined if what its forward does can be written down: if traces in both modes and for
other sizes are the same, line by line. Otherwise it stays a leaf, so that its own code decides as
ever. That costs layers, not truth. What holds most of the model has to be inlined, or there would
be nothing to cut: there, constants that depend on the mode are chosen by the mode, what Python
decided by becomes a guard, and a size that matters must be that of the sample.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self
from unittest.mock import Mock

import torch
from torch import Tensor, fx, nn

from syncpipe.data import described
from syncpipe.layers.conversion.signature import Signature, equal
from syncpipe.layers.conversion.trace import (
    Call,
    Fault,
    Text,
    Tracer,
    guard,
    leaves_of,
    map_tree,
)
from syncpipe.layers.time_first import is_time_first

__all__ = ["HOOKS", "LAYERS", "Progress", "Traced", "Whole", "live", "nodes_of", "traced"]

#: Where ``nn.Module`` keeps hooks; those of its forward and backward come first.
HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
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
        trace: of the sample, in training.
        whole: the modules that were not inlined though they have others inside.
        unlike: samples of other sizes with which the model decided otherwise somewhere.
        again: traces the sample once more, in one mode, with copies of all values.
        notes: what the user should know.
    """

    trace: Tracer
    whole: list[Whole]
    unlike: list[list[Tensor]]
    again: Callable[[bool], Tracer]
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


class _Inliner:
    def __init__(
        self, model: nn.Module, signature: Signature, tensors: list[Tensor], progress: Progress
    ) -> None:
        self.model, self.signature, self.tensors = model, signature, tensors
        self.name, self.progress = type(model).__name__, progress
        self.paths = {module: path for path, module in model.named_modules()}
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
        self.unlike: list[list[Tensor]] = []
        self.notes: list[str] = []
        self.pinned: list[Fault] = []  # why the batch size must be that of the sample
        self._refused: set[tuple[Any, int]] = set()  # sizes that the model itself refuses

    def settled(self) -> Traced:
        self._try()  # what is made in the first run only is made now
        while True:
            before = _attributes(self.model)
            training = self._run(True, self.tensors)
            evaluation = self._run(False, self.tensors)
            faults = [*training.faults, *evaluation.faults]
            faults += differences(training, evaluation, selects=self._holds_most)
            faults += [
                (node.meta["owner"], node.meta["line"], "Python decides by a size or a value")
                for node in live(training)
                if node.target is guard and not self._holds_most(node.meta["owner"])
            ]
            faults += self._set_attributes(before, _attributes(self.model))
            faults += self._vary(evaluation)
            if not self._leave(faults):
                break
        notes = self.notes
        if self.pinned:
            at = "".join(f"\n  {line or what}" for _, line, what in self.pinned[:3])
            notes.append(
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
        again = partial(self._run, tensors=self.tensors, copies=True)
        return Traced(training, whole, self.unlike, again, notes)

    def _try(self) -> None:
        self.progress.step()
        try:
            args, kwargs = self.signature.call(self.tensors)
            self.model.train()(*args, **kwargs)
        except Exception as error:
            sample = ", ".join(
                f"{name}: {described(tensor)}"
                for name, tensor in zip(self.signature.names, self.tensors, strict=True)
            )
            raise ValueError(
                f"{self.name} itself, called with the sample ({sample}), raises "
                f"{type(error).__name__}: {error}"
            ) from error

    def _run(self, training: bool, tensors: list[Tensor], *, copies: bool = False) -> Tracer:
        self.progress.step()
        self.model.train(training)
        names = self.signature.names
        tracer = Tracer(self.model, self.leaves, self.paths, names, copies=copies)
        return tracer.run(*self.signature.call(tensors))

    def _leave(self, faults: Iterable[Fault]) -> bool:
        """Makes the modules at fault leaves; whether there are any.

        Raises:
            ValueError: only modules that hold most of the model are at fault.
        """
        faults = list(faults)
        small = [fault for fault in faults if not self._holds_most(fault[0])]
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
        if "training" in what:
            return (
                "Move the lines that differ into a module of their own, which asks its own "
                "self.training and is left whole"
            )
        return (
            "Move this into a module of its own (which is left whole), or convert the modules in "
            "it one by one"
        )

    def _holds_most(self, path: str) -> bool:
        """Whether too little would be left of the model if this module were a leaf."""
        return not path or 2 * self.counts[path] > self.counts[""]

    def _set_attributes(self, before: Any, after: Any) -> Iterator[Fault]:
        for path in before:
            name = _changed(before[path], after.get(path, {}))
            inside = any(path == leaf or path.startswith(f"{leaf}.") for leaf in self.leaves)
            if name is not None and not inside:
                yield path, "", f"its forward sets the attribute {name}"

    # Other sizes

    def _vary(self, trace: Tracer) -> list[Fault]:
        """Runs other sizes; the faults of modules that can be leaves instead.

        Sizes that could not be varied are those of the sample in every call.
        """
        free: set[tuple[int, int]] = set()
        found: list[Fault] = []
        self.unlike.clear()
        self.pinned.clear()
        for group in self._groups():
            if group <= free:
                continue
            is_batch = all(d == 0 and self.signature.is_cut[k] for k, d in group)
            pinned: list[Fault] = []
            for varied, tensors in self._varied(group, is_batch):
                faults = [*differences(trace, varied), *varied.faults]
                small = [fault for fault in faults if not self._holds_most(fault[0])]
                found += small
                if is_batch and not small:
                    _check_outputs(self.name, trace.result, varied.result, tensors, self.tensors)
                if len(small) == len(faults):
                    free |= group
                    self.notes = list(self._time_cut(trace, varied)) if is_batch else self.notes
                    break
                pinned += faults
                self.unlike.append(tensors)
            else:
                self.pinned += pinned if is_batch else []
        if not found:
            for k, shape in enumerate(self.signature.shapes):
                for d in range(len(shape)):
                    shape[d] = None if (k, d) in free else shape[d]
        return found

    def _time_cut(self, trace: Tracer, varied: Tracer) -> Iterator[str]:
        """Modules that take time in dimension 0 and are given the batch there."""
        others = {node.meta["key"]: node for node in live(varied)}
        for node in sorted(live(trace), key=lambda node: str(node.meta["key"])):
            module = (
                self.model.get_submodule(str(node.target)) if node.op == "call_module" else None
            )
            if module is None or not is_time_first(module) or node.meta["key"] not in others:
                continue
            a, b = (next(iter(each.all_input_nodes)).meta["value"]
                    for each in (node, others[node.meta["key"]]))  # fmt: skip
            if a.dim() == 3 and a.shape[0] != b.shape[0] and a.shape[1] == b.shape[1]:
                yield (
                    f"{node.target} is an nn.{type(module).__name__} with batch_first=False, so it "
                    f"takes [time, batch, features], and is given {list(a.shape)} with the batch "
                    "of the sample in dimension 0: make it with batch_first=True, or transpose "
                    "before it, or give a sample with the batch in dimension 0"
                )

    def _groups(self) -> list[frozenset[tuple[int, int]]]:
        """Dimensions of tensors that may have to change together: the batch, then those alike."""
        cut = frozenset((k, 0) for k, is_cut in enumerate(self.signature.is_cut) if is_cut)
        sizes: dict[Any, set[tuple[int, int]]] = {}
        for k, tensor in enumerate(self.tensors):
            for d, size in enumerate(tensor.shape):
                if (k, d) not in cut and size > 1:
                    sizes.setdefault(size, set()).add((k, d))
                    sizes.setdefault((d, size), set()).add((k, d))
        return list(dict.fromkeys([cut, *map(frozenset, sizes.values())]))

    def _varied(self, group: Any, is_batch: bool) -> Iterator[tuple[Tracer, list[Tensor]]]:
        """Traces with other sizes in these dimensions, and those, where the model takes it."""
        k, d = next(iter(group))
        size = self.tensors[k].shape[d]
        for other in [1, 2 * size, size + 1] if is_batch else [size // 2, 2 * size]:
            if other in (0, size) or (group, other) in self._refused:
                continue
            tensors = [
                _resized(tensor, [d for j, d in group if j == k], other)
                for k, tensor in enumerate(self.tensors)
            ]
            try:
                trace = self._run(False, tensors)
            except Exception:  # the model itself refuses this size
                self._refused.add((group, other))
                continue
            yield trace, tensors

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


def nodes_of(tree: Any) -> list[fx.Node]:
    """The nodes in a tree."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, fx.Node)]


def live(trace: Tracer) -> set[fx.Node]:
    """The nodes that somebody misses if they are not done."""
    pending = nodes_of(trace.output)
    pending += [node for node in trace.root.nodes() if not node.meta["pure"]]
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def differences(
    a: Tracer, b: Tracer, *, selects: Callable[[str], bool] | None = None
) -> list[Fault]:
    """Where two traces of a model differ: for each call of a module the first line that does.

    Args:
        a: a trace.
        b: another one.
        selects: given if the two differ in the mode: for a module, whether a constant that differs
            is no fault. ``a`` then chooses it by ``self.training``.
    """
    comparison = _Comparison(live(a), live(b), selects)
    comparison.calls(a.root, b.root)
    if not comparison.found and comparison.merged(a.output, b.output, False) is None:
        comparison.fault("", "", "what the model returns is put together differently")
    return comparison.found


class _Comparison:
    def __init__(self, live_a: Any, live_b: Any, selects: Callable[[str], bool] | None) -> None:
        self.live_a, self.live_b, self.selects = live_a, live_b, selects
        self.found: list[Fault] = []
        self.doubtful: list[Any] = []  # calls that differ: what they gave may differ as well

    def fault(self, owner: str, line: str, what: str) -> None:
        if self.selects is not None and "made anew" not in what:
            what = f"it does otherwise in training than in evaluation ({what})"
        self.found.append((owner, line, what))

    def calls(self, a: Call, b: Call) -> None:
        left = [e for e in a.entries if isinstance(e, Call) or e in self.live_a]
        right = [e for e in b.entries if isinstance(e, Call) or e in self.live_b]
        for k in range(max(len(left), len(right))):
            one, two = (side[k] if k < len(side) else None for side in (left, right))
            what = self._entries(one, two)
            if what:
                shown = one if isinstance(one, fx.Node) else two
                line = shown.meta["line"] if isinstance(shown, fx.Node) else ""
                self.fault(a.owner, line, what)
                self.doubtful.append(a.key)
                return

    def _entries(self, one: fx.Node | Call | None, two: fx.Node | Call | None) -> str:
        """What differs, in words."""
        if one is None or two is None:
            return "more is done in one call than in another"
        if isinstance(one, Call) or isinstance(two, Call):
            if not (isinstance(one, Call) and isinstance(two, Call) and one.owner == two.owner):
                return "another module is called"
            self.calls(one, two)
            return ""
        if (one.op, one.target) != (two.op, two.target):
            return f"another thing is done ({_shown(one)}, {_shown(two)})"
        chosen = self.selects is not None and one.target is not guard
        constants = chosen and self.selects(one.meta["owner"])  # type: ignore[misc]
        merged = self.merged((one.args, one.kwargs), (two.args, two.kwargs), constants)
        if merged is None:
            return self.why
        one.args, one.kwargs = merged
        return ""

    def merged(self, a: Any, b: Any, constants: bool) -> Any:
        """A tree for both of two trees; None if there is none."""
        left, right = leaves_of(a), leaves_of(b)
        if repr(map_tree(_blank, a)) != repr(map_tree(_blank, b)):
            self.why = "what is passed is put together differently from time to time"
            return None
        new: list[Any] = []
        for one, two in zip(left, right, strict=True):
            merged = self._leaf(one, two, constants)
            if merged is None:
                return None
            new += merged
        following = iter(new)
        return map_tree(lambda _: next(following), a)

    def _leaf(self, one: Any, two: Any, constants: bool) -> tuple[Any] | None:
        """What stands for two leaves, in a tuple; None: they differ."""
        if isinstance(one, fx.Node) and isinstance(two, fx.Node):
            same = one.meta["key"] == two.meta["key"] or (self._doubts(one) and self._doubts(two))
            self.why = "it passes something else from time to time"
            if {one.meta["key"][0], two.meta["key"][0]} == {"constant"}:
                self.why = "it passes a Tensor that is made anew in every call"
            return (one,) if same else None
        a, b = (next(iter(leaf.values.values()), leaf) if isinstance(leaf, Text) else leaf
                for leaf in (one, two))  # fmt: skip
        if equal(a, b) or (type(a) is type(b) and isinstance(a, float) and repr(a) == repr(b)):
            return (one,)
        if any(isinstance(leaf, Text) and leaf.values for leaf in (one, two)):
            self.why = f"it passes a {type(a).__name__} that is made anew in every call"
            return None
        self.why = f"it depends on sizes or on the mode whether this is {one!r} or {two!r}"
        if not constants or isinstance(one, fx.Node) or isinstance(two, fx.Node):
            return None
        if (one, two) == (True, False):
            return (Text("self.training"),)
        return (Text(f"({one!r} if self.training else {two!r})"),)

    def _doubts(self, node: fx.Node) -> bool:
        return any(node.meta["key"][: len(key)] == key for key in self.doubtful)

    why = ""


class _Blank:
    def __repr__(self) -> str:
        return "_"


def _blank(leaf: Any) -> Any:
    return _Blank()


def _shown(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else node.target.__name__


# What is asked of modules


def _must_be_leaf(module: nn.Module) -> str:
    """Why a module is more than its forward and its children; empty if it is not."""
    kind = type(module)
    if not module._modules and not isinstance(module, _CONTAINERS):
        return "it has no modules inside"
    if isinstance(module, LAYERS):
        return "PyTorch's layer takes a faster way in evaluation"
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
    if module._compiled_call_impl is not None or "forward" in vars(module):
        return "it is compiled, or its forward was replaced"
    if hasattr(module, "parametrizations"):
        return "it is parametrized"
    if any(base.__name__ == "BaseTunerLayer" for base in kind.__mro__):
        return "it is an adapter of peft"
    return ""


def _attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What each module of a model has, by its path."""
    return {
        path: {
            name: dict(value) if name in ("_buffers", "_parameters", "_modules") else value
            for name, value in vars(module).items()
            if name != "training"
        }
        for path, module in model.named_modules()
    }


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The name of an attribute that is another object now; None: all are as they were."""
    for name in {**before, **after}:
        old, new = before.get(name, before), after.get(name, before)
        if old is new:
            continue
        if type(old) is dict and type(new) is dict:
            if old.keys() != new.keys() or any(old[key] is not new[key] for key in old):
                return name
        elif isinstance(old, Tensor) or not equal(old, new):
            return name
    return None


def _resized(tensor: Tensor, dims: list[int], size: int) -> Tensor:
    """A tensor with another size in some dimensions: its entries again, or fewer of them."""
    for d in dims:
        repeats = -(-size // tensor.shape[d])
        tensor = torch.cat([tensor] * repeats, d).narrow(d, 0, size)
    return tensor
