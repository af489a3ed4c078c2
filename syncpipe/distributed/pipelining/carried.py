"""What crosses from the process of one stage to that of the next one.

PyTorch's stages send tensors that require grad, and take back a gradient for each. Layers return
trees, with None, masks and indices in them, and skips pass by. So a boundary is the tree
``(value, skips)`` without its tensors, which both sides know beforehand, and these on the wire::

    layers -> (value, skips) -> Boundary.closed -> tensors -> ... -> Boundary.opened -> layers

A tensor without gradient travels as the bits of a floating-point one, and gets back zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.data import Structure, described, flatten, leaf_names, unflatten

__all__ = ["Boundary", "start"]

#: What tensors of integers of so many bytes are taken for on the wire.
_BITS = {2: torch.float16, 4: torch.float32, 8: torch.float64}
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype)


@dataclass(frozen=True)
class Boundary:
    """What one stage hands to the next one for each micro-batch.

    Attributes:
        where: for errors.
        structure: of the tree.
        leaves: of the tree; of a tensor its shape and dtype.
    """

    where: str
    structure: Structure | None
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, tree: Any, where: str) -> Boundary:
        """The boundary that such trees cross.

        Raises:
            TypeError: something in it cannot be sent to another process.
        """
        leaves, structure = flatten(tree)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            raise TypeError(
                f"there is no tensor in what {where} returns: choose a balance that does not cut "
                "here"
            )
        names = leaf_names("", tree)
        for name, leaf in zip(names, leaves, strict=True):
            if isinstance(leaf, Tensor):
                _plain(leaf, name, where)
            elif not isinstance(leaf, _CONSTANTS):
                raise TypeError(
                    f"{_named(name)} from {where} is of type {type(leaf).__name__}: from one "
                    "process to another go tensors, None, numbers and strings, in tuples, dicts "
                    "and the like; choose a balance that does not cut here"
                )
        kept = tuple(_Meta(t.shape, t.dtype) if isinstance(t, Tensor) else t for t in leaves)
        return cls(where, structure, kept)

    def __reduce__(self) -> Any:
        return Boundary.of, (self.empty(torch.device("meta")), self.where)

    def empty(self, device: torch.device) -> Any:
        """Such a tree, with zeros."""
        return unflatten(
            [
                torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
                if isinstance(leaf, _Meta)
                else leaf
                for leaf in self.leaves
            ],
            self.structure,
        )

    def wire(self) -> tuple[Tensor, ...]:
        """What is sent, on ``meta``."""
        with torch.no_grad():
            sent = [_encoded(t) for t in flatten(self.empty(torch.device("meta")))[0] if _is(t)]
        return tuple(tensor.requires_grad_() for tensor in sent)

    def closed(self, tree: Any, token: Tensor) -> tuple[Tensor, ...]:
        """From a tree to what is sent.

        Args:
            tree: what the stage gives.
            token: of the same micro-batch; the outputs depend on it in backward, whatever the
                layers do, so that every gradient that the stage before waits for is sent.

        Raises:
            ValueError: it is not what the boundary was made for; nothing has been sent of it.
        """
        leaves, structure = flatten(tree)
        if structure is not self.structure:
            alike = structure == self.structure
            if not alike:
                raise ValueError(
                    f"{self.where} now returns values of another structure than with the sample"
                )
        wire = []
        for k, (leaf, known) in enumerate(zip(leaves, self.leaves, strict=True)):
            if isinstance(leaf, Tensor) and isinstance(known, _Meta):
                if leaf.shape == known.shape and leaf.dtype == known.dtype:
                    leaf = _plain(leaf, k, self.where)
                    wire.append(_Leave.apply(token, _encoded(leaf)))  # type: ignore[no-untyped-call]
                    continue
            elif not isinstance(leaf, Tensor) and leaf == known:
                continue
            found = described(leaf) if isinstance(leaf, Tensor) else repr(leaf)
            raise ValueError(
                f"{_named(leaf_names('', tree)[k])} from {self.where} is {found}, and with the "
                f"sample it was {known}: between processes everything but the values of tensors "
                "stays the same from micro-batch to micro-batch"
            )
        return tuple(wire)

    def opened(self, wire: Sequence[Tensor]) -> tuple[Any, Tensor]:
        """From what was sent to the tree and its token."""
        token, *aliases = _Arrive.apply(*wire)  # type: ignore[no-untyped-call]
        tensors = iter(aliases)
        leaves = [
            _decoded(next(tensors), leaf.dtype) if isinstance(leaf, _Meta) else leaf
            for leaf in self.leaves
        ]
        return unflatten(leaves, self.structure), token


def start(device: torch.device) -> Tensor:
    """The token of a micro-batch on the first stage."""
    return torch.empty(0, device=device, requires_grad=True)


@dataclass(frozen=True)
class _Meta:
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


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


def _plain(tensor: Tensor, name: str | int, where: str) -> Tensor:
    """A tensor that can be sent; what waits for its values (tensor parallelism) has them then.

    Raises:
        TypeError: it cannot.
    """
    found = tensor if type(tensor) in (Tensor, nn.Parameter) else tensor.clone()
    if type(found) not in (Tensor, nn.Parameter) or found.layout is not torch.strided:
        name = _named(name) if isinstance(name, str) else f"tensor {name}"
        raise TypeError(
            f"{name} from {where} is of type {type(found).__name__} ({found.layout}): what goes to "
            "another process is a plain dense tensor; a DTensor becomes one by to_local(), or by "
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
    if dtype.itemsize == 1:
        return tensor.detach().to(torch.uint8).view(dtype)
    return tensor.detach().view(dtype)


def _is(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _named(name: str) -> str:
    """A leaf of ``(value, skips)`` in words."""
    return f"skip {name[3:]}" if name.startswith("[1]") else f"the value{name[3:]}"
