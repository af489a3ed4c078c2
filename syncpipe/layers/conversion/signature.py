"""What a converted model is called with: the signature of the original, and the sample's shapes.

    pipe(input_ids, attention_mask=mask)  ->  {"input_ids": ..., "attention_mask": ...}  ->  tensors

The tensors of the sample are the inputs of the first layer. All else in the sample (flags, None)
was decided by when the model was recorded, so that it has to be the same in every call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from syncpipe.data import NoChunk, described
from syncpipe.layers.conversion.trace import leaves_of, map_tree

__all__ = ["Signature", "equal"]


class Signature:
    """The signature of a model, and the sample that it was converted with.

    Args:
        forward: the forward of the model.
        name: of the model's class.
        args: positional arguments of the sample; tensors in ``NoChunk`` are not cut.
        kwargs: keyword arguments of the sample.

    Attributes:
        names: for each tensor of the sample how it is called in messages.
        shapes: and its shape; None for a dimension that may have another size in a call.

    Raises:
        TypeError: the sample does not fit the signature.
        ValueError: there is no tensor in it with a dimension to cut.
    """

    def __init__(
        self, forward: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        signature = inspect.signature(forward)
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        self.parameters = signature.replace(parameters=plain, return_annotation=signature.empty)
        self.name = name
        self._sample = self._bound(args, kwargs)
        leaves = self._leaves(self._sample)
        self._refuse_lists_of_images()
        tensors = [(where, leaf) for where, leaf in leaves if isinstance(leaf, (Tensor, NoChunk))]
        self.names = [where for where, _ in tensors]
        self.constants = [leaf for _, leaf in leaves if not isinstance(leaf, (Tensor, NoChunk))]
        cut = [leaf for _, leaf in tensors if isinstance(leaf, Tensor) and leaf.dim() > 0]
        if not cut:
            raise ValueError(
                f"the sample for {name} holds no tensor with a batch in dimension 0: give the "
                f"arguments of {name}.forward{self.parameters}, as for one call of the model"
            )
        self.batch = len(cut[0])
        bare: list[Tensor] = [
            leaf.tensor if isinstance(leaf, NoChunk) else leaf for _, leaf in tensors
        ]
        self._tensors_of_sample = bare
        self.is_cut = [
            isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == self.batch
            for _, leaf in tensors
        ]
        self._refuse_ambiguous(bare)
        self.shapes: list[list[int | None]] = [list(tensor.shape) for tensor in bare]
        self._kinds = [_kind(tensor) for tensor in bare]
        # What a call leaves out, and tensors are replaced by their place.
        places = iter(range(len(bare)))
        self._sample = map_tree(
            lambda leaf: _Place(next(places)) if isinstance(leaf, (Tensor, NoChunk)) else leaf,
            self._sample,
        )
        self._first = next(iter(self._sample), "")
        self._alone = len(bare) == 1 and isinstance(self._sample[self._first], _Place)

    def _refuse_lists_of_images(self) -> None:
        """Refuses what detection models take: a list of images, of which each is a sample."""
        for name, value in self._sample.items():
            listed = isinstance(value, (list, tuple)) and len(value) > 0
            if listed and all(
                isinstance(v, Tensor) and v.dim() == 3 and len(v) in (1, 3) for v in value
            ):
                raise ValueError(
                    f"{name} is a list of {len(value)} images ({described(value[0])}, ...), as "
                    "detection models take them: micro-batches are cut along dimension 0 of "
                    f"tensors, so {self.name} cannot be converted. Convert its backbone, which "
                    "takes a tensor of images and holds most of its parameters"
                )

    def _refuse_ambiguous(self, tensors: list[Tensor]) -> None:
        """Refuses a sample that does not show which of its tensors have the batch."""
        others = [size for tensor in tensors for size in tensor.shape[1:]]
        if sum(self.is_cut) > 1 and self.batch in others:
            shown = ", ".join(
                f"{name}: {described(tensor)}"
                for name, tensor in zip(self.names, tensors, strict=True)
            )
            raise ValueError(
                f"the batch size of the sample, {self.batch}, is the size of another dimension as "
                f"well ({shown}), so it does not show which tensors are cut into micro-batches: "
                "give a sample with another batch size, which is no size of anything else"
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

    def _leaves(self, arguments: dict[str, Any]) -> list[tuple[str, Any]]:
        found = []
        for name, value in arguments.items():
            leaves = leaves_of(value)
            lone = len(leaves) == 1 and leaves[0] is value
            found += [(name if lone else f"{name}[{k}]", leaf) for k, leaf in enumerate(leaves)]
        return found

    def take_sample(self) -> list[Tensor]:
        """The tensors of the sample, which are not kept."""
        tensors, self._tensors_of_sample = self._tensors_of_sample, []
        return tensors

    def call(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the sample, with copies of these tensors: models write into them."""

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, _Place):
                return leaf
            tensor = tensors[leaf.k]
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

        arguments = map_tree(copied, self._sample)
        bound = inspect.BoundArguments(self.parameters, arguments)
        return bound.args, bound.kwargs

    def packed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a call as one input: a tensor, or a dict by name.

        Tensors that are not cut are in ``NoChunk``.

        Raises:
            TypeError: they do not fit the signature.
            ValueError: they differ from the sample in what must be the same.
        """
        bound = self._bound(args, kwargs)
        tensors = self._tensors(bound)
        sizes = {
            len(tensor)
            for tensor, cut in zip(tensors, self.is_cut, strict=True)
            if cut and isinstance(tensor, Tensor)
        }
        if len(sizes) > 1:
            raise ValueError(self._ambiguous(tensors))
        if self._alone and isinstance(tensors[0], Tensor) and self.is_cut[0]:
            return tensors[0]
        marks = iter(zip(tensors, self.is_cut, strict=True))

        def marked(leaf: Any) -> Any:
            if not isinstance(leaf, (Tensor, NoChunk)):
                return leaf
            tensor, cut = next(marks)
            return leaf if cut or isinstance(leaf, NoChunk) else NoChunk(tensor)

        named: dict[str, Any] = map_tree(marked, bound)
        for name, parameter in self.parameters.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named.update(named.pop(name, {}))
        return named

    def arguments(self, input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """An input of ``train_batch`` as arguments: a tuple is positional, a dict by keyword."""
        if isinstance(input, Mapping):
            given, positional = dict(input), list[Any]()
            known = self.parameters.parameters
            starred = any(p.kind is p.VAR_POSITIONAL and name in given for name, p in known.items())
            for name, p in known.items():
                if p.kind is p.VAR_POSITIONAL:
                    positional += given.pop(name, ())
                elif name in given and (
                    p.kind is p.POSITIONAL_ONLY or (starred and p.kind is p.POSITIONAL_OR_KEYWORD)
                ):
                    positional.append(given.pop(name))
            return tuple(positional), given
        return (tuple(input), {}) if isinstance(input, (tuple, list)) else ((input,), {})

    def tensors(self, input: Any) -> list[Tensor]:
        """The tensors of an input, in the order of the sample."""
        if self._alone and isinstance(input, Tensor):
            self._check(0, input)
            return [input]
        args, kwargs = self.arguments(input)
        found = self._tensors(self._bound(args, kwargs))
        return [leaf.tensor if isinstance(leaf, NoChunk) else leaf for leaf in found]

    def _tensors(self, bound: dict[str, Any]) -> list[Any]:
        leaves = self._leaves(bound)
        tensors = [(where, leaf) for where, leaf in leaves if isinstance(leaf, (Tensor, NoChunk))]
        names = [where for where, _ in tensors]
        if names != self.names:
            extra = [name for name in names if name not in self.names]
            missing = [name for name in self.names if name not in names]
            raise ValueError(
                f"{self.name} was converted with the tensors {', '.join(self.names)}; "
                + " and ".join(
                    [f"{name} is a tensor here" for name in extra]
                    + [f"{name} is none" for name in missing]
                )
                + ": call it as in the sample, or convert the model with a sample like this call"
            )
        constants = [pair for pair in leaves if not isinstance(pair[1], (Tensor, NoChunk))]
        for (where, here), there in zip(constants, self.constants, strict=False):
            if not equal(here, there):
                raise ValueError(
                    f"{self.name} was converted with {where}={there!r}, not {here!r}: its layers "
                    "do what the model does for that; convert it with a sample like this call"
                )
        if len(constants) != len(self.constants):
            raise ValueError(
                f"{self.name} was converted with other arguments than it is called with: call it "
                "as in the sample, or convert the model with a sample like this call"
            )
        for k, (_, leaf) in enumerate(tensors):
            self._check(k, leaf.tensor if isinstance(leaf, NoChunk) else leaf)
        return [leaf for _, leaf in tensors]

    def _check(self, k: int, tensor: Tensor) -> None:
        shape = self.shapes[k]
        fits = len(shape) == tensor.dim() and all(
            there is None or here == there for here, there in zip(tensor.shape, shape, strict=True)
        )
        if fits and _kind(tensor) == self._kinds[k]:
            return
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{self.names[k]} is {described(tensor)}, but {self.name} was converted for "
            f"{self._kinds[k]}[{wanted}] (what the model does depends on these sizes): give it "
            "that, or convert the model with a sample like this call"
        )

    def _ambiguous(self, tensors: list[Any]) -> str:
        lines = "".join(
            f"\n  {name}: {described(tensor)}"
            for name, tensor, cut in zip(self.names, tensors, self.is_cut, strict=True)
            if cut and isinstance(tensor, Tensor)
        )
        return (
            "which tensors are cut into micro-batches is decided by the sample (those with its "
            f"batch size, {self.batch}, in dimension 0), and these differ in dimension 0:{lines}\n"
            "Wrap those that every micro-batch needs whole in syncpipe.NoChunk(tensor)."
        )


class _Place:
    """Stands for a tensor of the sample."""

    def __init__(self, k: int) -> None:
        self.k = k


def _kind(tensor: Tensor) -> str:
    if tensor.dtype is torch.bool:
        return "bool"
    if tensor.is_complex():
        return "complex"
    return "float" if tensor.is_floating_point() else "int"


def equal(a: Any, b: Any) -> bool:
    """Whether two values are of one type and equal, as far as they tell."""
    try:
        return a is b or (type(a) is type(b) and bool(a == b))
    except Exception:
        return False
