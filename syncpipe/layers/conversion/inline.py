"""Decides which modules of a model are leaves, called as they are, and which are inlined.

A module is inlined if what its forward does can be written down: if traces of other runs, also of
other sizes, are the same, line by line. Otherwise it stays a leaf, so that its own code decides as
ever. That costs layers, not truth. What holds most of the model has to be inlined, or there would
be nothing to cut: there, what Python decided by becomes a guard, and a size that matters must be
that of the sample. Training and evaluation are traced each by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from syncpipe.data import described, flatten, leaf_names
from syncpipe.layers.conversion.signature import Signature
from syncpipe.layers.conversion.trace import Tracer, Whole, guard
from syncpipe.runtime.random_numbers import is_compiled
from syncpipe.skip.skippable import is_skippable
from syncpipe.state import State

__all__ = ["HOOKS", "Inlined", "hooks_of"]

#: Where ``nn.Module`` keeps hooks; those of its forward and backward come first.
HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip
#: PyTorch's own, which take faster ways in evaluation, or are looked for by their class.
_LAYERS = (
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention, _NormBase,
)  # fmt: skip
_STATE_METHODS = ("get_extra_state", "set_extra_state", "_save_to_state_dict")
#: Dimensions that change together, each as the index of a tensor and its own.
_Group = frozenset[tuple[int, int]]


class Inlined:
    """A model, run until it is known which of its modules can be inlined.

    The signature learns which sizes must be those of the sample. ``runs`` has the traces of the
    sample, by whether in training; ``leaves`` by path why modules are not inlined, the line and the
    reason; ``unlike`` other samples, with the lines by which the model decided otherwise; ``notes``
    what the user should know.
    """

    def __init__(self, model: nn.Module, signature: Signature, tensors: list[Tensor]) -> None:
        self.model, self.signature, self.tensors = model, signature, tensors
        self.name, self._objects = type(model).__name__, dict[str, Any]()
        self._paths = {module: path for path, module in model.named_modules()}
        self.leaves = {
            path: Whole(path, "", reason)
            for module, path in self._paths.items()
            if path and (reason := _must_be_leaf(module))
        }
        self._refuse_root()
        #: Where there are parameters.
        self._owners = [f"{path}." for module, path in self._paths.items() if module._parameters]
        self._refused = set[Any]()  # sizes that the model itself refuses
        with _bar(self.name) as self._bar:
            self._settle()

    def _settle(self) -> None:
        self._try()  # what is made in the first run only is made now
        own, again = [*self.model.parameters(), *self.model.buffers()], True
        while again:
            self.unlike: list[tuple[list[Tensor], set[str]]] = []
            self.notes: list[str] = []
            state = State({"": self.model}, own, objects=False)
            self.runs = {training: self._run(training, self.tensors) for training in (True, False)}
            faults = [fault for run in self.runs.values() for fault in run.faults]
            faults += [
                Whole(node.meta["owner"], node.meta["line"], "Python decides by a size or a value")
                for run in self.runs.values()
                for node in run.nodes
                if node.target is guard and not self._holds_most(node.meta["owner"])
            ]
            faults += self._changed(state)
            again = self._leave(faults or self._vary())
        self.notes += self._large_modules()

    @property
    def whole(self) -> list[Whole]:
        """The modules that were not inlined though they have others inside."""
        found = [self.leaves[path] for path in self._outermost()]
        return [leaf for leaf in found if self.model.get_submodule(leaf.path)._modules]

    def _outermost(self) -> list[str]:
        """The leaves that are in no other one."""
        outer = [f"{path}." for path in self.leaves]
        return [path for path in self.leaves if not any(map(path.startswith, outer))]

    def _try(self) -> None:
        try:
            args, kwargs = self.signature.call(self.tensors)
            self.model.train()(*args, **kwargs)
        except Exception as error:
            raise ValueError(
                f"{self.name} itself, called with the sample "
                f"({self.signature.shown(self.tensors)}), raises {type(error).__name__}: {error}"
            ) from error

    def _run(self, training: bool, tensors: list[Tensor]) -> Tracer:
        if self._bar is not None:
            self._bar.update()
        names = self.signature.names
        tracer = Tracer(self.model.train(training), self.leaves, self._paths, names, self._objects)
        return tracer.run(*self.signature.call(tensors))

    def _leave(self, faults: list[Whole]) -> bool:
        """Makes the modules at fault leaves; whether there are any."""
        small = self._small(faults)
        for fault in small:
            self.leaves.setdefault(fault.path, fault)
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
        config, peft = (
            getattr(self.model, name, None) for name in ("config", "active_peft_config")
        )
        if getattr(peft, "is_prompt_learning", False):
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
            return "Layers that are dropped at random cannot be cut: make the model of a config" + (
                " with layerdrop=0.0"
            )
        if "mask_hidden_states" in line and getattr(config, "apply_spec_augment", False):
            return "Drawn masks cannot be cut: set model.config.apply_spec_augment = False"
        return (
            "Move this into a module of its own (which is kept as one layer), or convert the "
            "modules in it one by one"
        )

    def _holds_most(self, path: str) -> bool:
        """Whether too little would be left of the model if this module were a leaf."""
        inside = sum(owner.startswith(f"{path}.") for owner in self._owners)
        return not path or 2 * inside > len(self._owners)

    def _small(self, faults: list[Whole]) -> list[Whole]:
        """The faults of modules that can be leaves."""
        return [fault for fault in faults if not self._holds_most(fault.path)]

    def _changed(self, state: State) -> Iterator[Whole]:
        """What the forward of a module that is inlined sets, or puts into a place of its own."""
        for kind, name in state.changes():
            ways = [path for path in self._paths.values() if name.startswith(f"{path}.")]
            path = max(ways, key=len, default="")
            inside = any(f"{path}.".startswith(f"{leaf}.") for leaf in self.leaves)
            own = name.removeprefix(f"{path}.")
            if kind != "generator" and own != "training" and not inside:
                yield Whole(path, "", f"its forward sets the attribute {own}")

    # Other runs

    def _vary(self) -> list[Whole]:
        """Runs other sizes; the faults of modules that can be leaves instead.

        Sizes that could not be varied are those of the sample in every call.
        """
        free = set[tuple[int, int]]()
        found: list[Whole] = []
        for number, group in enumerate(self._groups()):
            if group <= free:
                continue
            is_batch, pinned = not number, list[Whole]()
            k, d = next(iter(group))
            size = self.tensors[k].shape[d]
            for other in [1, 2 * size, size + 1] if is_batch else [size // 2, 2 * size]:
                tensors = self._resized(group, other)
                faults = None if other in (0, size) else self._tried(tensors, is_batch=is_batch)
                if faults is None:
                    continue  # the model itself refuses this size
                found += self._small(faults)
                if self._small(faults) == faults:
                    free |= group
                    break
                pinned += faults
                self.unlike.append((tensors, {fault.line for fault in faults}))
            if is_batch and not free:
                again = [(run, self._run(mode, self.tensors)) for mode, run in self.runs.items()]
                if faults := [fault for pair in again for fault in differences(*pair)]:
                    return faults  # it is not the size
                self._note_pinned(pinned)
        if not found:
            self.signature.free = free
        return found

    def _groups(self) -> list[_Group]:
        """Dimensions of tensors that may have to change together: the batch, then those alike."""
        cut = frozenset((k, 0) for k, is_cut in enumerate(self.signature.is_cut) if is_cut)
        sizes: dict[Any, set[tuple[int, int]]] = {}
        for k, tensor in enumerate(self.tensors):
            for d, size in enumerate(tensor.shape):
                if (k, d) not in cut and size > 1:
                    sizes.setdefault(size, set()).add((k, d))
                    sizes.setdefault((d, size), set()).add((k, d))
        return list(dict.fromkeys([cut, *map(frozenset, sizes.values())]))

    def _resized(self, group: _Group, size: int) -> list[Tensor]:
        """The sample with another size: its entries again, or fewer of them."""
        tensors = list(self.tensors)
        for k, d in group:
            repeats = -(-size // tensors[k].shape[d])
            tensors[k] = torch.cat([tensors[k]] * repeats, d).narrow(d, 0, size)
        return tensors

    def _tried(self, tensors: list[Tensor], *, is_batch: bool) -> list[Whole] | None:
        """The faults that come to light with other sizes; None: the model refuses them."""
        key = tuple(tensor.shape for tensor in tensors)
        faults: list[Whole] = []
        for training in (False, True):
            base = self.runs[training]
            try:
                if key in self._refused:
                    return None
                other = self._run(training, tensors)
            except Exception:
                self._refused.add(key)
                return None
            faults += [*differences(base, other), *other.faults]
            if self._small(faults) != faults:
                return faults
            if is_batch:
                _check_outputs(self.name, base.result, other.result, tensors, self.tensors)
        return faults

    # What is said

    def _note_pinned(self, faults: list[Whole]) -> None:
        at = "".join(f"\n  {line or what}" for _, line, what in faults[:3])
        self.notes.append(
            f"{self.name} was converted for batches of {self.signature.batch} only, so a "
            "Pipe must cut each mini-batch into micro-batches of this size. The model does "
            f"something else with others, here:{at}"
        )

    def _large_modules(self) -> Iterator[str]:
        """Says which module that was not inlined has most of the model."""
        total = sum(parameter.numel() for parameter in self.model.parameters())
        calls = [node for node in self.runs[True].nodes if node.op == "call_module"]
        seconds = sum(node.meta["seconds"] for node in calls)
        for path, line, reason in self.whole:
            module = self.model.get_submodule(path)
            share = sum(parameter.numel() for parameter in module.parameters()) / total
            time = sum(node.meta["seconds"] for node in calls if node.target == path)
            large = share > 0.5 or (seconds > 0.1 and time > seconds / 2)
            if large and not isinstance(module, _LAYERS):  # which nobody writes anew
                part = f"{share:.0%} of the parameters, {time / (seconds or 1):.0%} of the time"
                yield (
                    f"{path} ({type(module).__name__}) is one layer and has {part}: "
                    f"{reason}" + (f":\n  {line}\n" if line else ". ") + "Where that can be in a "
                    "module of its own, the rest is cut (layers.whole lists all such modules)"
                )

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
            theirs = {path: module.training for path, module in model.named_modules()}
            for module in model.modules():
                module.training = mode
            for path in self._outermost():  # as the layers do
                model.get_submodule(path).train(mode)
            for path, module in model.named_modules():
                if module.training is not theirs[path]:
                    raise ValueError(
                        f"{self.name}.train({mode}) leaves {path!r} in the other mode, "
                        "which train() of its layers would not: write that into the train() of "
                        "the module itself"
                    )


def _bar(name: str) -> Any:
    """A progress bar for what takes longer than two seconds, where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return nullcontext()
    desc = f"sequential({name})"
    return tqdm(desc=desc, total=20, unit="run", delay=2, leave=False, disable=None)


def _check_outputs(
    name: str, result: Any, varied: Any, tensors: list[Tensor], sample: list[Tensor]
) -> None:
    """Refuses outputs of which the batch is not dimension 0: they could not be concatenated."""
    sizes = {(len(a), len(b)) for a, b in zip(sample, tensors, strict=True) if a.dim()}
    n, m = next(pair for pair in sizes if pair[0] != pair[1])
    pairs = zip(flatten(result)[0], flatten(varied)[0], strict=False)
    for at, (a, b) in zip(leaf_names("output", result), pairs, strict=False):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() == b.dim() > 0):
            continue
        follows = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
        if follows != [0] or a.shape[0] * m != b.shape[0] * n:
            dims = " and ".join(map(str, follows))
            raise ValueError(
                f"{at} of {name} is {described(a)} for a batch of {n} and {described(b)} for "
                f"one of {m}: it has {f'the batch in dimension {dims}' if dims else 'no batch'}, "
                "and outputs of micro-batches are put together along dimension 0. Let the model "
                "return it with the batch in dimension 0 (transposed, or expanded), leave it out, "
                "or compute it of the outputs (a matrix of all samples with all others, in the "
                "loss)"
            )


# Comparing two traces


def differences(a: Tracer, b: Tracer) -> list[Whole]:
    """Where two traces of a model differ: for each call of a module the first line that does."""
    found: list[Whole] = []
    live = a.live | b.live
    doubtful: list[Any] = []  # calls that differ: what they gave may differ as well

    def value(node: fx.Node) -> Any:
        key = node.meta["key"]
        return f"%{next((call for call in doubtful if key[: len(call)] == call), key)}"

    steps = [{node.meta["key"]: node for node in run.nodes if node in live} for run in (a, b)]
    for key in sorted(dict.fromkeys(chain(*steps)), key=("output",).__eq__):
        pair = [run[key] for run in steps if key in run]
        call = own = pair[0].meta["call"]
        while call not in a.steps or call not in b.steps:
            call = call[:-1]  # the innermost one that both made
        lines = {
            f"{n.op} {n.target!r} {fx.node.map_arg((n.args, n.kwargs), value)!r}" for n in pair
        }
        alike = len(pair) == 2 and len(lines) == 1
        if not alike and not any(call[: len(other)] == other for other in doubtful):
            reason = _reason(pair) if call == own else "another module is called"
            found.append(Whole(call[-1][1], pair[0].meta["line"], reason))
            doubtful.append(call)
    return found


def _reason(pair: list[fx.Node]) -> str:
    """What differs, in words."""
    if len(pair) == 1:
        return "more is done in one call than in another"
    one, two = pair
    if one.op == "output":
        return "what the model returns is put together differently"
    for a, b in zip(one.all_input_nodes, two.all_input_nodes, strict=False):
        if a.meta["key"][0] == b.meta["key"][0] == "object" and a.target != b.target:
            return f"it passes a {type(a.meta['value']).__name__} that is made anew in every call"
    names = [n.target if isinstance(n.target, str) else n.target.__name__ for n in pair]
    if names[0] != names[1]:
        return f"another thing is done from time to time ({', '.join(names)})"
    return f"what it passes to {names[0]} depends on sizes, or differs from call to call"


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks that others have registered on a module."""
    hooks = {kind: getattr(module, kind, {}).values() for kind in HOOKS}
    own = "_syncpipe_own"
    return [kind for kind in HOOKS if not all(hasattr(hook, own) for hook in hooks[kind])]


def _must_be_leaf(module: nn.Module) -> str:
    """Why a module is more than its forward and its children; empty if it is not."""
    kind = type(module)
    reasons = {
        "it has no modules inside": not module._modules
        and not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)),
        "PyTorch's layer takes a faster way in evaluation, or is looked for by its class":
            isinstance(module, _LAYERS),
        "it is a ScriptModule": isinstance(module, torch.jit.ScriptModule),
        "it is a Pipe, or has skips of its own": is_skippable(module)
        or hasattr(kind, "_syncpipe_skips_are_internal"),
        "it has hooks": bool(hooks_of(module)),
        "it saves a state of its own":
            any(getattr(kind, name) is not getattr(nn.Module, name) for name in _STATE_METHODS),
        "it is compiled, or its forward was replaced":
            is_compiled(module) or "forward" in vars(module),
        "it is parametrized": hasattr(module, "parametrizations"),
        "it is an adapter of peft":
            any(base.__name__ == "BaseTunerLayer" for base in kind.__mro__),
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), "")
