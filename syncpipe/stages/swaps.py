"""Other tensors in modules, for one run of a cell.

A stage that is not the owner of a tied weight computes with a leaf of its own, as does a replica,
and a stage whose weights have several versions. Where other threads run these modules or look at
them (another call, the loss function, which may go through all parameters), the cell runs on
shallow copies of the modules, as ``torch.nn.parallel.replicate`` makes them.

Versions of a stream, and leaves for modules whose ``forward`` is their own (compiled), are put into
the modules themselves and taken out after the run; the lock of the stage is held meanwhile.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from syncpipe.layers.batchnorm import ORIGINAL

__all__ = ["ShallowCopy", "Swap", "knows_itself", "swaps_of"]

_MISSING = object()
#: A dict, a name in it, and what to put there.
Swap = tuple[dict[str, Any], str, Any]


def swaps_of(partition: nn.Module, others: dict[int, Tensor]) -> list[Swap]:
    """What lets modules compute with other tensors.

    Args:
        partition: the modules.
        others: by the identity of a tensor what to put in its place.
    """
    found: list[Swap] = []
    for module in partition.modules():
        for held in (module._parameters, module._buffers):
            found += [(held, name, others[id(t)]) for name, t in held.items() if id(t) in others]
        for name, value in module.__dict__.items():
            if type(value) is list and any(id(item) in others for item in value):
                found.append((module.__dict__, name, _replaced(value, others)))
    return found


def _replaced(weights: list[Any], others: dict[int, Tensor]) -> list[Any]:
    """A list with other tensors, as the flat weights of an LSTM."""
    return [others.get(id(item), item) for item in weights]


class ShallowCopy:
    """The modules of a partition once more, with other tensors; they last from call to call.

    Args:
        partition: the partition.
    """

    def __init__(self, partition: nn.Module) -> None:
        self._original = partition
        self._made: dict[int, tuple[nn.Module, Any]] = {}
        self._first: list[dict[str, Any]] = []
        self.partition: Any = self.follow({})

    def follow(self, others: dict[int, Tensor]) -> Any:
        """The copy, made what the modules are now.

        Args:
            others: by the identity of a tensor what is in its place.

        Raises:
            ValueError: a module has a ``forward`` that knows it.
        """
        before, self._made, self._first = self._made, {}, []
        for module in self._original.modules():
            _, other = before.get(id(module), (None, None))
            if type(other) is not type(module):
                other = object.__new__(type(module))
            self._made[id(module)] = module, other
        for module, other in self._made.values():
            state = self._state(module, others)
            object.__setattr__(other, "__dict__", state)  # `__setattr__` may be the user's
            self._first.append(dict(state))
        self.partition = self._made[id(self._original)][1]
        return self.partition

    def _state(self, module: nn.Module, others: dict[int, Tensor]) -> dict[str, Any]:
        state = {ORIGINAL: module, **module.__dict__}  # that of a copy of a copy stays
        for name, value in list(state.items()):
            if type(value) is MethodType and id(value.__self__) in self._made:
                state[name] = MethodType(value.__func__, self._made[id(value.__self__)][1])
            elif type(value) is list and any(id(item) in others for item in value):
                state[name] = _replaced(value, others)
            elif others and name in _KNOWING and value is not None:
                raise ValueError(
                    f"a {type(module).__name__} has replicas, or weights in common with another "
                    "stage, so that shallow copies of it run; and its forward was compiled, or put "
                    "in the place of its class's, and knows this one module: give the stage one "
                    "device, choose a balance that puts what is tied into one stage, or compile "
                    "another layer"
                )
        state["_modules"] = {
            name: None if child is None else self._made[id(child)][1]
            for name, child in module._modules.items()
        }
        state["_parameters"] = {k: others.get(id(t), t) for k, t in module._parameters.items()}
        if any(id(t) in others for t in module._buffers.values()):
            state["_buffers"] = {k: others.get(id(t), t) for k, t in module._buffers.items()}
        return state

    def give_back(self) -> None:
        """Sets on the modules what a forward has set on their copies."""
        for (module, other), first in zip(self._made.values(), self._first, strict=True):
            for name, value in other.__dict__.items():
                if first.get(name, _MISSING) is not value:
                    module.__dict__[name] = value


_KNOWING = ("forward", "_compiled_call_impl")


def knows_itself(module: nn.Module) -> bool:
    """Whether a module has a ``forward`` of its own, so that it cannot be copied."""
    own = [module.__dict__.get(name) for name in _KNOWING]
    return any(value is not None and type(value) is not MethodType for value in own)
