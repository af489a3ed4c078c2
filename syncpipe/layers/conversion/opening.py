"""Decides which modules of a model are opened, and which are left whole.

A module is opened if what its forward does can be written down: if recordings in both modes and
for other sizes are the same. Otherwise it is left whole, so that its own code decides as ever. That
costs layers, not truth. What holds most of the model has to be opened, or there would be nothing
to cut: there, what depends on the mode is chosen by the mode, what Python decided by is checked in
every call, and a size that matters must be that of the sample.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.layers.conversion.recording.compare import Fault, differences, live
from syncpipe.layers.conversion.recording.recorder import Recorder
from syncpipe.layers.conversion.signature import Signature, equal
from syncpipe.tree import described

__all__ = ["HOOKS", "Opening"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
#: Where ``nn.Module`` keeps hooks; those of its forward and backward come first.
HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip
_STATE_METHODS = ("get_extra_state", "set_extra_state", "_save_to_state_dict")


class Opening:
    """A model, run until it is known which of its modules can be opened.

    Args:
        model: the model.
        signature: of its forward; learns which sizes must be those of the sample.
        tensors: of the sample.

    Attributes:
        recording: of the sample, in training.
        whole: the paths of the modules that were left whole.
        unlike: samples of other sizes with which the model decided otherwise somewhere.

    Raises:
        ValueError: the model cannot be converted; with the line that is in the way.
    """

    def __init__(self, model: nn.Module, signature: Signature, tensors: list[Tensor]) -> None:
        self.model, self.signature, self.tensors = model, signature, tensors
        self.paths = {module: path for path, module in model.named_modules()}
        self.device = next(model.parameters()).device
        self.whole = {
            path for module, path in self.paths.items() if path and _must_stay_whole(module)
        }
        self._refuse_root()
        self._counts = Counter(
            path[:end]
            for path in _with_parameters(model)
            for end in {0, *(k for k, c in enumerate(path) if c == "."), len(path)}
        )
        self.unlike: list[list[Tensor]] = []
        self.recording = self._opened()

    def _opened(self) -> Recorder:
        self._try()  # what is made in the first run only is made now
        for _ in range(len(self.paths) + 1):
            before = _attributes(self.model)
            training = self._run(True, self.tensors)
            evaluation = self._run(False, self.tensors)
            faults = [*training.faults, *evaluation.faults]
            faults += differences(training, evaluation, selects=self._holds_most)
            faults += self._checked(training)
            after = _attributes(self.model)
            faults += [
                (path, "", f"its forward sets the attribute {name}")
                for path in before
                if (name := _changed(before[path], after.get(path, {}))) is not None
                and path not in self._inside_whole()
            ]
            if self._close(faults):
                continue
            if not self._vary(evaluation):
                return training
        raise AssertionError("every round leaves a module whole")

    def _try(self) -> None:
        try:
            args, kwargs = self.signature.call(self.tensors)
            self.model.train()(*args, **kwargs)
        except Exception as error:
            sample = ", ".join(
                f"{name}: {described(tensor)}"
                for name, tensor in zip(self.signature.names, self.tensors, strict=True)
            )
            raise ValueError(
                f"{type(self.model).__name__} itself, called with the sample ({sample}), raises "
                f"{type(error).__name__}: {error}"
            ) from error

    def _checked(self, recording: Recorder) -> list[Fault]:
        return [
            (node.owner, node.line, "Python decides by a size or a value")
            for node in live(recording)
            if node.kind == "check" and not self._holds_most(node.owner)
        ]

    def _close(self, faults: Iterable[Fault]) -> bool:
        """Leaves the modules at fault whole; whether there are any."""
        new = set()
        for owner, line, what in faults:
            if self._holds_most(owner):
                name = type(self.model.get_submodule(owner)).__name__
                at = f" ({owner})" if owner else ""
                where = f":\n  {line}\n" if line else ". "
                raise ValueError(
                    f"{name}{at} cannot be cut into layers, {what}{where}Move this into a module "
                    "of its own (which is left whole), or convert the modules in it one by one"
                )
            new.add(owner)
        self.whole |= new
        return bool(new)

    def _holds_most(self, path: str) -> bool:
        """Whether too little would be left of the model if this module were left whole."""
        return not path or 2 * self._counts[path] > self._counts[""]

    def _inside_whole(self) -> set[str]:
        return {
            path
            for path in self.paths.values()
            if any(path == whole or path.startswith(f"{whole}.") for whole in self.whole)
        }

    def again(self, training: bool) -> Recorder:
        """Another recording of the sample, with copies of all values."""
        return self._run(training, self.tensors, copies=True)

    def _run(self, training: bool, tensors: list[Tensor], *, copies: bool = False) -> Recorder:
        self.model.train(training)
        names = self.signature.names
        recorder = Recorder(self.model, self.whole, self.paths, self.device, names, copies=copies)
        recorder.run(*self.signature.call(tensors))
        return recorder

    # Other sizes

    def forget(self, lines: list[str]) -> bool:
        """Takes checks out of the recording, if all of them are of whether numbers are the same."""
        checks = [n for n in live(self.recording) if n.kind == "check" and n.line in lines]
        if not all(n.args[0].target in (operator.eq, operator.ne) for n in checks):
            return False
        for node in checks:
            node.kind, node.args = "constant", ()  # which nobody uses
        return True

    def _vary(self, recording: Recorder) -> bool:
        """Runs other sizes; whether modules had to be left whole for that.

        Sizes that could not be varied are those of the sample in every call.
        """
        free: set[tuple[int, int]] = set()
        self.unlike.clear()
        for group in self._groups():
            if group <= free:
                continue
            for varied, tensors in self._varied(group):
                faults = [*differences(recording, varied), *varied.faults]
                if self._close(fault for fault in faults if not self._holds_most(fault[0])):
                    return True
                if not faults:
                    free |= group
                    break
                self.unlike.append(tensors)
        for k, shape in enumerate(self.signature.shapes):
            for d in range(len(shape)):
                if (k, d) in free:
                    shape[d] = None
        return False

    def _groups(self) -> list[set[tuple[int, int]]]:
        """Dimensions of tensors that may have to change together: the batch, then those alike."""
        cut = {(k, 0) for k, is_cut in enumerate(self.signature.is_cut) if is_cut}
        sizes: dict[Any, set[tuple[int, int]]] = {}
        for k, tensor in enumerate(self.tensors):
            for d, size in enumerate(tensor.shape):
                if (k, d) not in cut and size > 1:
                    sizes.setdefault(size, set()).add((k, d))
                    sizes.setdefault((d, size), set()).add((k, d))
        return [cut, *sizes.values()]

    def _varied(self, group: set[tuple[int, int]]) -> Iterator[tuple[Recorder, list[Tensor]]]:
        """Recordings with other sizes in these dimensions, and those, where the model takes it."""
        k, d = next(iter(group))
        size = self.tensors[k].shape[d]
        others = [1, 2 * size, size + 1] if self.signature.is_cut[k] and d == 0 else []
        for other in others or [size // 2, 2 * size, size - 1]:
            if other in (0, size):
                continue
            tensors = [
                _resized(tensor, [d for j, d in group if j == k], other)
                for k, tensor in enumerate(self.tensors)
            ]
            try:
                varied = self._run(False, tensors)
            except Exception:  # the model itself refuses this size
                continue
            yield varied, tensors

    # What is refused at once

    def _refuse_root(self) -> None:
        model = self.model
        hooks = [name for name in HOOKS[:4] if getattr(model, name)]
        if hooks:
            raise ValueError(
                f"{type(model).__name__} has hooks ({', '.join(hooks)}), which its layers would "
                "not run: remove them, or register them on the modules in it"
            )
        for mode in (True, False):
            model.train(mode)
            for path, module in model.named_modules():
                if module.training is not mode:
                    raise ValueError(
                        f"{type(model).__name__}.train({mode}) leaves {path!r} in the other mode, "
                        "which train() of its layers would not: write that into the train() of "
                        "the module itself"
                    )


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


def _with_parameters(model: nn.Module) -> list[str]:
    return [
        path
        for path, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]


def _must_stay_whole(module: nn.Module) -> bool:
    """Whether a module is more than its forward and its children."""
    kind = type(module)
    return (
        (not module._modules and not isinstance(module, _CONTAINERS))
        or isinstance(module, torch.jit.ScriptModule)
        or getattr(kind, "_syncpipe_skips_are_internal", False)
        or getattr(kind, "_syncpipe_skippable", False)
        or any(getattr(module, name, None) for name in HOOKS)
        or any(getattr(kind, name) is not getattr(nn.Module, name) for name in _STATE_METHODS)
        or module._compiled_call_impl is not None
        or "forward" in vars(module)
        or hasattr(module, "parametrizations")
        or any(base.__name__ == "BaseTunerLayer" for base in kind.__mro__)  # adapters of peft
    )


def _resized(tensor: Tensor, dims: list[int], size: int) -> Tensor:
    """A tensor with another size in some dimensions: its entries again, or fewer of them."""
    for d in dims:
        repeats = -(-size // tensor.shape[d])
        tensor = torch.cat([tensor] * repeats, d).narrow(d, 0, size)
    return tensor
