"""``syncpipe.sequential``: any ``nn.Module`` as an ``nn.Sequential``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from syncpipe.layers.conversion.code import COLLECTED, Writer
from syncpipe.layers.conversion.cutting import Piece, cut
from syncpipe.layers.conversion.layer import ConvertedLayer, Holder
from syncpipe.layers.conversion.names import distribute, in_order, index_keys
from syncpipe.layers.conversion.opening import Opening
from syncpipe.layers.conversion.recording.compare import live
from syncpipe.layers.conversion.signature import Signature
from syncpipe.layers.conversion.verify import evaluated_alike, first_difference
from syncpipe.layers.conversion.verify import verify as compared
from syncpipe.skip import Namespace
from syncpipe.state import unchanged

__all__ = ["Converted", "batch_input", "call_arguments", "call_input", "sequential"]


class Converted(nn.Sequential):
    """The layers that :func:`sequential` made of a model; called as the model is.

    Its parameters and buffers have the names that they have in the model.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the forward of the model."""
        value = call_input(self, args, kwargs)
        for layer in self:
            value = layer(value)
        return value

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the model: its names, in its order."""
        return in_order(self, prefix, recurse, remove_duplicate)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        index_keys(state_dict, prefix, self)
        super()._load_from_state_dict(state_dict, prefix, *args)


def sequential(
    model: nn.Module, *sample_args: Any, verify: bool = True, **sample_kwargs: Any
) -> Converted:
    """Makes an ``nn.Sequential`` of any model, for ``Pipe``::

        layers = syncpipe.sequential(model, input_ids, attention_mask=mask)
        pipe = Pipe(layers, balance="parameters", chunks=8)
        pipe(input_ids, attention_mask=mask).logits
        pipe.train_batch({"input_ids": ids, "attention_mask": mask}, labels, loss_fn=loss_fn)

    The model is run with the sample, a few times, and what it does is recorded. Modules without
    children, and those that cannot be looked into, are called as they are: they are the very
    objects, with their hooks. Modules made of others are opened: their ``forward`` becomes code
    between the calls, which ``print`` shows; it does not run any more, and hooks that are
    registered on them later do not, either. (Modules that have hooks already are not opened.)

    What is recorded holds for other sizes than those of the sample where the model was seen to do
    the same with them; otherwise a call with another size is refused. Flags and None count as they
    are in the sample. ``.train()``, ``.eval()`` and the devices of stages are followed. A dtype is
    not: call ``model.half()`` before.

    Args:
        model: any module. It is found as it was, and shares its modules with the layers.
        sample_args: arguments of one call of the model. Small tensors will do, of more than one
            sample. Those that have the batch size of the first one in dimension 0 are cut into
            micro-batches by a ``Pipe``, the others go whole to each; :class:`NoChunk` says so by
            hand.
        verify: compare outputs, gradients and buffers with those of the model, for the sample.
        sample_kwargs: keyword arguments, likewise. (One that is called ``verify`` cannot be given.)

    Returns:
        The layers, as many as there can be. Names in ``state_dict()`` and ``named_parameters()``
        are the model's, also in a ``Pipe`` of them.

    Raises:
        TypeError: ``model`` is no module, or the sample does not fit its signature.
        ValueError: the model has no parameters, it fails with the sample, the sample does not show
            which tensors have the batch, or the model cannot be cut; with the line of its code
            that is in the way.
        RuntimeError: the layers give something else than the model (``verify``).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"sequential() takes an nn.Module, not {type(model).__name__}")
    name = type(model).__name__
    if next(model.parameters(), None) is None:
        raise ValueError(
            f"{name} has no parameters, so there is nothing to train and nothing to balance: give "
            "the model that has them"
        )
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise ValueError(f"{name} has lazy modules that know no sizes yet: run it once before")
    if verify and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{name} is on meta, where nothing can be compared: say verify=False")
    signature = Signature(model.forward, name, sample_args, sample_kwargs)
    layers = unchanged(model, partial(_converted, model, signature, verify))
    for module in layers.modules():
        if isinstance(module, (Converted, Holder)):  # the others are as they were
            module.training = model.training
    return layers


def _converted(model: nn.Module, signature: Signature, verify: bool) -> Converted:
    opening = Opening(model, signature, signature.take_sample())
    pieces = cut(opening.recording, model)
    layers = _layers(model, opening, pieces)
    if _forget_what_does_not_matter(model, layers, opening):
        pieces = cut(opening.recording, model)
        layers = _layers(model, opening, pieces)
    if verify:
        _verify(model, layers, opening, pieces)
    return layers


def _layers(model: nn.Module, opening: Opening, pieces: list[Piece]) -> Converted:
    writer, namespace = Writer(), Namespace()
    recording, layers = opening.recording, []
    for k, piece in enumerate(pieces):
        first, last = k == 0, piece.gives is None
        takes = recording.inputs if first else [*piece.takes, *(node for _, node in piece.pops)]
        gives = recording.output if last else tuple(piece.given)
        layers.append(
            ConvertedLayer(
                writer.layer(piece.nodes, takes, gives),
                writer.constants,
                takes=None if first else len(piece.takes),
                gives=None if piece.gives is None else len(piece.gives),
                pops=tuple(name for name, _ in piece.pops),
                stashes=tuple(name for name, _ in piece.stashes),
                namespace=namespace,
                signature=opening.signature if first else None,
            )
        )
    distribute(model, layers, [piece.nodes for piece in pieces])
    return Converted(*layers)


def _forget_what_does_not_matter(model: nn.Module, layers: Converted, opening: Opening) -> bool:
    """Takes out checks of decisions that make no difference; whether there are any.

    With one sample, say, something need not be expanded to the batch. Where the layers were seen to
    give the same as the model all the same, nobody has to be kept from it.
    """
    found = False
    for tensors in [] if opening.device.type == "meta" else opening.unlike:
        call = partial(opening.signature.call, tensors)
        token = COLLECTED.set([])
        try:
            same = evaluated_alike(model, layers, call)
            lines = COLLECTED.get() or []
        finally:
            COLLECTED.reset(token)
        found |= bool(same and lines and opening.forget(lines))
    return found


def _verify(model: nn.Module, layers: Converted, opening: Opening, pieces: list[Piece]) -> None:
    """Compares the layers with the model.

    Raises:
        RuntimeError: they differ; with the first layer that does.
    """
    call = partial(opening.signature.call, opening.tensors)
    found = compared(model, layers, call)
    if found is None:
        return
    if found in ("training", "evaluation"):
        again = unchanged(model, lambda: opening.again(found == "training"))
        values = {node.key: node.value for node in live(again)}
        given = [piece.given for piece in pieces]
        input = opening.signature.packed(*call())
        k = unchanged(layers, lambda: first_difference(layers, given, values.get, input))
        what = f"the output in {found}"
    else:
        holders = [k for k, layer in enumerate(layers) if found in layer.state_dict()]
        what, k = f"the gradient of {found}", holders[-1] if holders else 0
    raise RuntimeError(
        f"the layers do something else than {type(model).__name__}: {what} differs, first in layer "
        f"{k}:\n{layers[k]}\nDoes the model do the same in every call? If not, make it so, or move "
        "what is shown here into a module of its own"
    )


def call_input(layers: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the first layer gets where the layers are called with these arguments."""
    signature = _signature(layers)
    if signature is not None:
        return signature.packed(args, kwargs)
    if getattr(layers, "_unpack", False) and bool(kwargs) != bool(args) and len(args) != 1:
        return args or kwargs  # as the layers take them
    return _one(*args, **kwargs)


def batch_input(layers: nn.Module, input: Any) -> Any:
    """What the first layer gets for ``train_batch(input)``: a tuple or a dict is arguments."""
    signature = _signature(layers)
    return input if signature is None else signature.packed(*signature.arguments(input))


def call_arguments(layers: nn.Module, input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How layers are called themselves with what is an input for ``train_batch``."""
    signature = _signature(layers)
    return ((input,), {}) if signature is None else signature.arguments(input)


def _signature(layers: nn.Module) -> Signature | None:
    first = next(iter(layers._modules.values()), None)
    return first.signature if isinstance(first, ConvertedLayer) else None


def _one(input: Any) -> Any:
    return input


_one.__name__ = _one.__qualname__ = "forward"
