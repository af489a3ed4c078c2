"""What crosses from the process of one stage to that of the next one.

PyTorch's stages send tensors that require grad, and take back a gradient for each. Layers return
trees, with None, masks and indices in them, and skips pass by. So a boundary is the tree
``(value, skips)`` without its values, which both sides know beforehand, and these on the wire::

    layers -> (value, skips) -> Boundary.closed -> tensors -> ... -> Boundary.opened -> layers

A tensor without gradient travels as the bits of a floating-point one, and gets back zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.data import described, flatten, leaf_names, map_tensors, tensors_in

__all__ = ["Boundary"]

#: What tensors of integers of so many bytes are taken for on the wire.
_BITS = {2: torch.float16, 4: torch.float32, 8: torch.float64}
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype)


class Boundary:
    """What one stage hands to the next one for each micro-batch: trees like an example."""

    def __init__(self, tree: Any, where: str) -> None:
        for name, leaf in zip(leaf_names("", tree), flatten(tree)[0], strict=True):
            if not isinstance(leaf, (Tensor, *_CONSTANTS)):
                name = f"skip {name[3:]}" if name.startswith("[1]") else f"the value{name[3:]}"
                raise TypeError(
                    f"{name} from {where} is of type {type(leaf).__name__}: from one process to "
                    "another go tensors, None, numbers and strings, in tuples, dicts and the like; "
                    "choose a balance that does not cut here"
                )
        self._where, self._kind = where, _kind(tree)
        sent = [_plain(tensor, where) for tensor in tensors_in(tree)]
        if not sent:
            raise TypeError(
                f"there is no tensor in what {where} returns: choose a balance that does not cut "
                "here"
            )
        self._tree = map_tensors(lambda _: [torch.zeros_like(t, device="meta") for t in sent], tree)

    def __reduce__(self) -> Any:
        return Boundary, (self._tree, self._where)

    def empty(self, device: torch.device) -> Any:
        return map_tensors(lambda ts: [torch.zeros_like(t, device=device) for t in ts], self._tree)

    def wire(self) -> tuple[Tensor, ...]:
        return tuple([_encoded(t).detach().requires_grad_() for t in tensors_in(self._tree)])

    def closed(self, tree: Any, token: Tensor) -> tuple[Tensor, ...]:
        """From a tree to what is sent.

        The outputs depend on the token of the micro-batch in backward, whatever the layers do, so
        that every gradient that the stage before waits for is sent.
        """
        kind = _kind(tree)
        if kind != self._kind:
            raise ValueError(
                f"{self._where} returns {kind[0]}, and with the sample it was {self._kind[0]}: "
                "between processes everything but the values of tensors stays the same from "
                "micro-batch to micro-batch"
            )
        sent = [_encoded(_plain(tensor, self._where)) for tensor in tensors_in(tree)]
        return tuple([_Leave.apply(token, tensor) for tensor in sent])  # type: ignore[no-untyped-call]

    def opened(self, wire: Sequence[Tensor]) -> tuple[Any, Tensor]:
        token, *aliases = _Arrive.apply(*wire)  # type: ignore[no-untyped-call]

        def decoded(like: list[Tensor]) -> list[Tensor]:
            return [_decoded(t, known.dtype) for t, known in zip(aliases, like, strict=True)]

        return map_tensors(decoded, self._tree), token


def _kind(tree: Any) -> tuple[str, Any]:
    """All of a tree but the values of its tensors."""
    leaves, structure = flatten(tree)
    shown = [described(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    return ", ".join(shown), structure


class _Arrive(torch.autograd.Function):
    """Aliases of what arrived, which layers may change in place; a zero gradient where none is."""

    @staticmethod
    def forward(ctx: Any, *wire: Tensor) -> tuple[Tensor, ...]:
        return wire[0].new_empty(0), *[tensor.detach() for tensor in wire]

    @staticmethod
    def backward(ctx: Any, _: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


class _Leave(torch.autograd.Function):
    """An alias that requires grad: PyTorch detaches what was sent in place, which no view allows.

    One tensor for each: PyTorch's halves of a backward know nodes with one output only.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, tensor: Tensor) -> Tensor:
        ctx.like = token
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(ctx.like), grad


def _plain(tensor: Tensor, where: str) -> Tensor:
    """A tensor that can be sent; what waits for its values (tensor parallelism) has them then."""
    found = tensor if type(tensor) in (Tensor, nn.Parameter) else tensor.clone()
    if type(found) not in (Tensor, nn.Parameter) or found.layout is not torch.strided:
        raise TypeError(
            f"{where} returns a tensor of type {type(found).__name__} ({found.layout}): what goes "
            "to another process is a plain dense one; a DTensor becomes one by to_local(), or by "
            "output layouts with use_local_output=True"
        )
    return found


def _encoded(tensor: Tensor) -> Tensor:
    """As a contiguous floating-point tensor of at least two bytes."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).contiguous()
    if tensor.is_floating_point() and tensor.itemsize > 1:
        return tensor.contiguous()
    bare = tensor.detach().contiguous()
    if tensor.itemsize == 1:
        return bare.view(torch.uint8).to(torch.float16)
    return bare.view(_BITS[tensor.itemsize])


def _decoded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(tensor)
    if tensor.dtype == dtype:
        return tensor
    bare = tensor.detach()
    return (bare.to(torch.uint8) if dtype.itemsize == 1 else bare).view(dtype)
