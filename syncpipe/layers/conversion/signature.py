"""What a converted model is called with: the signature of the original, and the sample's shapes.

    pipe(input_ids, attention_mask=mask)  ->  {"input_ids": ..., "attention_mask": ...}  ->  tensors

The tensors of the sample are the inputs of the first layer. All else in the sample (flags, None)
was decided by when the model was traced, so that it has to be the same in every call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from syncpipe.data import NoChunk, described
from syncpipe.layers.conversion.trace import equal, leaves_of, map_tree

__all__ = ["Signature"]


class _Place:
    """Stands for a tensor of the sample; the class itself, of which there are no copies."""


class Signature:
    """The signature of a model's ``forward``, and the sample that it was converted with.

    For each tensor of the sample: its name for messages in ``names``, and in ``is_cut`` whether it
    is cut into micro-batches, which those in ``NoChunk`` are not. ``free`` has the dimensions that
    may have another size in a call, each as the index of a tensor and its own.
    """

    def __init__(
        self, forward: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        signature = inspect.signature(forward)
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        self.parameters = signature.replace(parameters=plain, return_annotation=signature.empty)
        self.name = name
        sample = self._bound(args, kwargs)
        self._refuse_lists_of_images(sample)
        tensors, self._constants = _split(sample)
        self.names = list(tensors)
        self._tensors_of_sample = bare = list(map(_bare, tensors.values()))
        cut = [t for t in tensors.values() if isinstance(t, Tensor) and t.dim() > 0 and len(t)]
        if not cut:
            raise ValueError(
                f"the sample for {name} holds no tensor with a batch in dimension 0: give the "
                f"arguments of {name}.forward{self.parameters}, as for one call of the model"
            )
        self.batch = len(cut[0])
        self.is_cut = [
            isinstance(t, Tensor) and t.dim() > 0 and len(t) == self.batch for t in tensors.values()
        ]
        others = [size for tensor in bare for size in tensor.shape[1:]]
        if sum(self.is_cut) > 1 and self.batch in others:
            raise ValueError(
                f"the batch size of the sample, {self.batch}, is the size of another dimension as "
                f"well ({self.shown(bare)}), so it does not show which tensors are cut into "
                "micro-batches: give a sample with another batch size, which is no size of "
                "anything else"
            )
        self.free: set[tuple[int, int]] = set()
        self._shapes = [tensor.shape for tensor in bare]
        self._kinds = list(map(_kind, bare))
        self._sample = map_tree(lambda leaf: _Place if _is_tensor(leaf) else leaf, sample)
        self._alone = len(bare) == 1 and next(iter(self._sample.values())) is _Place

    def _refuse_lists_of_images(self, sample: dict[str, Any]) -> None:
        """Refuses what detection models take: a list of images, of which each is a sample."""
        for name, value in sample.items():
            if (
                isinstance(value, (list, tuple))
                and value
                and all(isinstance(v, Tensor) and v.dim() == 3 and len(v) in (1, 3) for v in value)
            ):
                raise ValueError(
                    f"{name} is a list of {len(value)} images ({described(value[0])}, ...), as "
                    "detection models take them: micro-batches are cut along dimension 0 of "
                    f"tensors, so {self.name} cannot be converted. Convert its backbone, which "
                    "takes a tensor of images and holds most of its parameters"
                )

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name."""
        try:
            bound = self.parameters.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{error}: {self.name} takes {self.parameters}, as the model that was converted"
            ) from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def shown(self, tensors: list[Tensor]) -> str:
        """The names and shapes of tensors, in words."""
        pairs = zip(self.names, tensors, strict=True)
        return ", ".join(f"{name}: {described(tensor)}" for name, tensor in pairs)

    def take_sample(self) -> list[Tensor]:
        """The tensors of the sample, which are not kept."""
        tensors, self._tensors_of_sample = self._tensors_of_sample, []
        return tensors

    def call(self, tensors: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the sample, with copies of these tensors: models write into them."""
        return self._with(t.detach().clone().requires_grad_(t.requires_grad) for t in tensors)

    def _with(self, tensors: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the sample, with these tensors."""
        following = iter(tensors)
        given = map_tree(lambda leaf: next(following) if leaf is _Place else leaf, self._sample)
        bound = inspect.BoundArguments(self.parameters, given)
        return bound.args, bound.kwargs

    def packed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The tensors of a call as one input: a tensor, or a dict by the names of the sample.

        Tensors that are not cut are in ``NoChunk``.
        """
        tensors = self._checked(self._bound(args, kwargs))
        marked = zip(self.names, tensors, self.is_cut, strict=True)
        cut = {name: t for name, t, is_cut in marked if is_cut and isinstance(t, Tensor)}
        if len(set(map(len, cut.values()))) > 1:
            lines = "".join(f"\n  {name}: {described(tensor)}" for name, tensor in cut.items())
            raise ValueError(
                "which tensors are cut into micro-batches is decided by the sample (those with its "
                f"batch size, {self.batch}, in dimension 0), and these differ in dimension 0:"
                f"{lines}\nWrap those that every micro-batch needs whole in "
                "syncpipe.NoChunk(tensor)."
            )
        if self._alone and cut:
            return tensors[0]
        return {
            name: tensor if name in cut or isinstance(tensor, NoChunk) else NoChunk(tensor)
            for name, tensor in zip(self.names, tensors, strict=True)
        }

    def arguments(self, input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """An input of ``train_batch`` as arguments: a tuple is positional, a dict by keyword."""
        if isinstance(input, Mapping):
            return self._with(input.values()) if list(input) == self.names else ((), dict(input))
        return (tuple(input), {}) if isinstance(input, (tuple, list)) else ((input,), {})

    def tensors(self, input: Any) -> list[Tensor]:
        """The tensors of an input, in the order of the sample."""
        if self._alone and isinstance(input, Tensor):
            self._check(0, input)
            return [input]
        return list(map(_bare, self._checked(self._bound(*self.arguments(input)))))

    def _checked(self, bound: dict[str, Any]) -> list[Any]:
        """The tensors among arguments, which have to be like the sample."""
        again = ": call it as in the sample, or convert the model with a sample like this call"
        tensors, constants = _split(bound)
        if list(tensors) != self.names:
            here = [f"{name} is a tensor here" for name in tensors if name not in self.names]
            here += [f"{name} is none" for name in self.names if name not in tensors]
            names = ", ".join(self.names)
            raise ValueError(
                f"{self.name} was converted with the tensors {names}; {' and '.join(here)}{again}"
            )
        if list(constants) != list(self._constants):
            raise ValueError(
                f"{self.name} was converted with other arguments than it is called with{again}"
            )
        for name, value in constants.items():
            if not equal(value, self._constants[name]):
                raise ValueError(
                    f"{self.name} was converted with {name}={self._constants[name]!r}, not "
                    f"{value!r}: its layers do what the model does for that; convert it with a "
                    "sample like this call"
                )
        for k, leaf in enumerate(tensors.values()):
            self._check(k, _bare(leaf))
        return list(tensors.values())

    def _check(self, k: int, tensor: Tensor) -> None:
        sizes = [
            "any" if (k, d) in self.free else str(size) for d, size in enumerate(self._shapes[k])
        ]
        fits = tensor.dim() == len(sizes) and _kind(tensor) == self._kinds[k]
        if fits and all(b in ("any", str(a)) for a, b in zip(tensor.shape, sizes, strict=True)):
            return
        raise ValueError(
            f"{self.names[k]} is {described(tensor)}, but {self.name} was converted for "
            f"{self._kinds[k]}[{', '.join(sizes)}] (what the model does depends on these sizes): "
            "give it that, or convert the model with a sample like this call"
        )


def _split(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors in arguments, and all else in them, by names for messages."""
    found: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for name, value in arguments.items():
        leaves = leaves_of(value)
        lone = len(leaves) == 1 and leaves[0] is value
        for k, leaf in enumerate(leaves):
            found[not _is_tensor(leaf)][name if lone else f"{name}[{k}]"] = leaf
    return found


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, NoChunk))


def _bare(leaf: Any) -> Any:
    return leaf.tensor if isinstance(leaf, NoChunk) else leaf


def _kind(tensor: Tensor) -> str:
    if tensor.dtype is torch.bool or tensor.is_complex():
        return "complex" if tensor.is_complex() else "bool"
    return "float" if tensor.is_floating_point() else "int"
