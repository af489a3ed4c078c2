"""The arguments of a converted model: the signature of the original, and the sample's shapes.

    pipe(input_ids, attention_mask=mask)  ->  {"input_ids": ..., "attention_mask": ...}  ->  tensors

The tensors of the sample are the inputs of the first layer. The trace depends on all other values
in the sample (flags, None), which must therefore be equal in every call. Evaluation may have a
sample of its own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.data.batch_classes import batch_kind, samples_of
from syncpipe.data.trees import by_name, described, equal, flatten, map_tensors, unflatten
from syncpipe.data.uncut import NoChunk, hidden_tensor, to_cut, without_no_chunk

__all__ = [
    "Signature", "batch_input", "call_arguments", "call_input", "common_outputs",
    "model_signature", "refresh",
]  # fmt: skip


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Signature:
    """The signature of a model's ``forward``, and the sample that it was converted with.

    Attributes:
        names: for each tensor of the sample its name in messages.
        is_cut: for each tensor whether it is cut into micro-batches (False in ``NoChunk``).
        free: dimensions whose size may change between calls, as (index of the tensor, dimension).
        batch: the batch size of the sample.
        evaluation: the signature in evaluation, if that has a sample of its own.
    """

    evaluation: Signature | None = None
    _mode = ""  # in messages

    def __init__(self, forward: Callable[..., Any], name: str) -> None:
        signature = inspect.signature(forward)
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        self.parameters = signature.replace(parameters=plain, return_annotation=signature.empty)
        self.name = name
        self.free: set[tuple[int, int]] = set()

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Learn a sample, and return its tensors, to which no reference is kept."""
        sample, names = self._bound(args, kwargs), list(self.parameters.parameters)
        self._positional, self._given = {*names[: len(args)]}, {*names[: len(args)], *kwargs}
        self._refuse_lists_of_images(sample)
        found = _by_name(sample)
        self._sample = {at: Tensor if is_input(leaf) else leaf for at, leaf in found.items()}
        empty = unflatten(self._sample.values(), flatten(sample, batches=True)[1])
        self._structure = flatten(empty)[1]  # holds no tensors
        named = {at: leaf for at, leaf in found.items() if is_input(leaf)}
        self.names, tensors = list(named), list(map(without_no_chunk, named.values()))
        # 0 for what is never cut, for example NoChunk.
        sizes = [samples_of(value) or 0 for value in named.values()]
        self.batch = next(filter(None, sizes), 0)
        if not self.batch:
            raise ValueError(
                f"the sample for {self.name} holds no tensor with a batch in dimension 0: give the "
                f"arguments of {self.name}.forward{self.parameters}, as for one call of the model"
            )
        for at, leaf in found.items():
            within = hidden_tensor(leaf, lambda t: t.dim() > 0 and len(t) == self.batch)
            if within is not None and not is_input(leaf):
                raise ValueError(
                    f"{at} is a {type(leaf).__name__}, which holds a tensor with the batch at "
                    f"{at}{within} that is no entry of a tuple, dict or dataclass, so that it is "
                    f"not cut into micro-batches. Leave it out (a cache), or {to_cut(leaf)}"
                )
        self.is_cut = [
            size == self.batch or batch_kind(value) is not None
            for size, value in zip(sizes, named.values(), strict=True)
        ]
        self._shapes, self._kinds = list(map(shape_of, tensors)), list(map(_kind, tensors))
        return tensors

    def take_evaluation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Learn a sample for evaluation, whose tensors must be among those of the sample."""
        own = copy.copy(self)
        tensors = own.take(args, kwargs)
        for name, tensor in zip(own.names, tensors, strict=True):
            k = self.names.index(name) if name in self.names else -1
            if k < 0 or (shape_of(tensor), _kind(tensor)) != (self._shapes[k], self._kinds[k]):
                there = f"{self._kinds[k]}{list(self._shapes[k])}" if k >= 0 else "no such tensor"
                raise ValueError(
                    f"eval_sample has {name}={described(tensor)}, and the sample {there}: the "
                    "tensors of evaluation must be some of the sample's, of the same sizes"
                )
        self.evaluation, self._mode, own._mode = own, " for training", " for evaluation"

    def of(self, training: bool) -> Signature:
        """The signature in a mode."""
        return self if training or self.evaluation is None else self.evaluation

    def _refuse_lists_of_images(self, sample: dict[str, Any]) -> None:
        """Raise for a list of images, one per sample, as detection models take."""
        for name, value in sample.items():
            if (
                isinstance(value, (list, tuple))
                and value
                and self.parameters.parameters[name].kind is not inspect.Parameter.VAR_POSITIONAL
                and all(isinstance(v, Tensor) and v.dim() == 3 and len(v) in (1, 3) for v in value)
            ):
                raise ValueError(
                    f"{name} is a list of {len(value)} images ({described(value[0])}, ...), as "
                    "detection models take them: micro-batches are cut along dimension 0 of "
                    f"tensors, so {self.name} cannot be converted. Convert its backbone, which "
                    "takes a tensor of images and holds most of its parameters"
                )

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            bound = self.parameters.bind(*args, **kwargs)
        except TypeError as error:
            stars = "**" if args and isinstance(args[0], Mapping) else "*"
            one = len(args) == 1 and not kwargs and isinstance(args[0], (tuple, list, Mapping))
            raise TypeError(
                f"{error}: {self.name} takes {self.parameters}, as the model that was converted"
                + (f". Unpack the {type(args[0]).__name__}: {stars}batch" if one else "")
            ) from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def shown(self, tensors: list[Tensor]) -> str:
        pairs = zip(self.names, tensors, strict=True)
        return ", ".join(f"{name}: {described(tensor)}" for name, tensor in pairs)

    def call(self, tensors: Sequence[Tensor], training: bool = True) -> _Arguments:
        """The arguments of a call in a mode, with copies of tensors like the sample's: models may
        write into them."""
        given, own = dict(zip(self.names, tensors, strict=True)), self.of(training)
        return own.arguments(map_tensors(_copies, given[name]) for name in own.names)

    def settle(self, *, is_cut: list[bool] | None = None, free: set[tuple[int, int]]) -> None:
        """Sets what conversion finds of the tensors, in both modes."""
        self.is_cut, self.free = is_cut or self.is_cut, free
        if (own := self.evaluation) is not None:
            places = [self.names.index(name) for name in own.names]
            own.is_cut = [self.is_cut[k] for k in places]
            own.free = {(places.index(k), d) for k, d in free if k in places}

    def arguments(self, values: Iterable[Any]) -> _Arguments:
        """The arguments of the sample, with its tensors replaced by these values."""
        rest = iter(values)
        leaves = [next(rest) if leaf is Tensor else leaf for leaf in self._sample.values()]
        args, kwargs = list[Any](), dict[str, Any]()
        for name, value in unflatten(leaves, self._structure).items():
            kind = self.parameters.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                args += value
            elif kind is inspect.Parameter.VAR_KEYWORD:
                kwargs |= value
            elif name in self._positional:
                args.append(value)
            elif name in self._given:
                kwargs[name] = value
        return tuple(args), kwargs

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The tensors (or ``NoChunk``) in arguments; raises if the rest differs from the sample."""
        found = _by_name(self._bound(args, kwargs))
        for name in {**self._sample, **found}:
            then, now = self._sample.get(name, ...), found.get(name, ...)
            if not (equal(then, now) or (then is Tensor and is_input(now))):
                raise ValueError(
                    f"{self.name} was converted with a sample{self._mode} in which {name} is "
                    f"{_shown(then)}, and here it is {_shown(now)}, for which the model may do "
                    "something else: call it as in the sample, or convert the model with a sample "
                    "like this call"
                )
        return [leaf for leaf in found.values() if is_input(leaf)]

    def given_as_one(self, input: Any) -> list[Any]:
        """As ``given``, of one input: a tuple of positional, or a mapping of keyword arguments."""
        if batch_kind(input):
            return self.given((input,), {})
        if isinstance(input, Mapping):
            return list(input.values()) if [*input] == self.names else self.given((), dict(input))
        return self.given(tuple(input) if isinstance(input, (tuple, list)) else (input,), {})

    def packed(self, values: list[Any]) -> Any:
        """Values of a call as one dict by the names of the sample, uncut ones in ``NoChunk``."""
        self._check(values, whole=True)
        marked = zip(self.names, values, self.is_cut, strict=True)
        return {
            name: value if is_cut or isinstance(value, NoChunk) else NoChunk(value)
            for name, value, is_cut in marked
        }

    def tensors(self, input: Any) -> list[Tensor]:
        """The tensors in the input of the first layer, in the order of the sample."""
        values = self.given_as_one(input)
        self._check(values, whole=False)
        return list(map(without_no_chunk, values))

    def _check(self, values: list[Any], *, whole: bool) -> None:
        """Raise for other sizes and kinds; ``whole``: a mini-batch, which may be cut later."""
        for k, tensor in enumerate(map(without_no_chunk, values)):
            free = self.free | ({(k, 0)} if whole and self.is_cut[k] else set())
            sizes = ["any" if (k, d) in free else str(n) for d, n in enumerate(self._shapes[k])]
            kind, shape = _kind(tensor), shape_of(tensor)
            pairs = zip(shape, sizes, strict=False)
            if (
                len(shape) != len(sizes)
                or kind != self._kinds[k]
                or any(size not in ("any", str(n)) for n, size in pairs)
            ):
                raise ValueError(
                    f"{self.names[k]} is {described(tensor)}, but {self.name} was converted for "
                    f"{self._kinds[k]}[{', '.join(sizes)}] (what the model does depends on these "
                    "sizes): give it that, or convert the model with a sample like this call"
                )


def _by_name(arguments: dict[str, Any]) -> dict[str, Any]:
    """The leaves of arguments by their names in messages."""
    trees = (by_name(name, value, batches=True) for name, value in arguments.items())
    return {at: leaf for tree in trees for at, leaf in tree.items()}


def _shown(leaf: Any) -> str:
    if leaf is ...:
        return "not there"
    return "a tensor" if leaf is Tensor or is_input(leaf) else f"{leaf!r}"


def is_input(leaf: Any) -> bool:
    """Whether a leaf may change between calls: a tensor, or a batch of a registered class."""
    return isinstance(leaf, (Tensor, NoChunk)) or batch_kind(leaf) is not None


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a tensor, or ``(number of samples,)`` of a batch of a registered class."""
    return tuple(value.shape) if isinstance(value, Tensor) else (samples_of(value) or 0,)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


def _kind(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    if tensor.dtype is torch.bool or tensor.is_complex():
        return "complex" if tensor.is_complex() else "bool"
    return "float" if tensor.is_floating_point() else "int"


# Calls of layers, converted or not


def call_input(
    layers: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
    training: bool | None = None, *, unpack: bool = False,
) -> Any:  # fmt: skip
    """The input of the first layer for a call with these arguments, in the mode of the layers or
    in another one. With ``unpack`` several arguments are a tuple, or a dict."""
    signature = _signature_of(layers, training)
    if signature is not None:
        refresh(layers)
        return signature.packed(signature.given(args, kwargs))
    if unpack and bool(kwargs) != bool(args) and len(args) != 1:
        return args or kwargs
    if kwargs.keys() - {"input"} or len(args) + len(kwargs) != 1:
        raise TypeError(
            f"a pipe takes one input, as an nn.Sequential does, and was given "
            f"{len(args) + len(kwargs)} arguments ({', '.join([*map(_type_of, args), *kwargs])}): "
            "put several into a tuple or a dict, pipe((x, mask)), which is the input of the first "
            "layer; Pipe(..., unpack=True) spreads it over the arguments of that"
        )
    return args[0] if args else kwargs["input"]


def refresh(layers: nn.Module) -> None:
    """Make converted layers follow changes of their model; raises for others (``Origin``)."""
    origins = {vars(layer).get("_origin") for layer in layers._modules.values()}
    for origin in filter(None, origins):
        origin.refresh()


def batch_input(layers: nn.Module, input: Any, training: bool | None = None) -> Any:
    """As ``call_input``, for ``train_batch(input)``: a tuple or a dict is arguments."""
    signature = _signature_of(layers, training)
    return input if signature is None else signature.packed(signature.given_as_one(input))


def call_arguments(layers: nn.Module, input: Any) -> _Arguments:
    """The arguments that call the layers themselves with an input of ``train_batch``."""
    signature = _signature_of(layers)
    if signature is None:
        return (input,), {}
    return signature.arguments(signature.given_as_one(input))


def common_outputs(layers: nn.Module) -> Collection[int]:
    """Indices of output leaves that are equal in every micro-batch (made of parameters alone)."""
    last = next(reversed(layers._modules.values()), None)
    return getattr(last, "common_outputs", ())


def model_signature(layers: nn.Module) -> inspect.Signature | None:
    """The signature of the model that layers were converted from, or None."""
    signature = _signature_of(layers)
    return None if signature is None else signature.parameters


def _signature_of(layers: nn.Module, training: bool | None = None) -> Signature | None:
    first = next(iter(layers._modules.values()), None)
    found = None if first is None else vars(first).get("_model_signature")
    return found and found.of(layers.training if training is None else training)


def _type_of(value: Any) -> str:
    return type(value).__name__
