"""``syncpipe.sequential``: any ``nn.Module`` as an ``nn.Sequential``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from syncpipe.layers.conversion.code import Writer
from syncpipe.layers.conversion.cutting import Piece, cut
from syncpipe.layers.conversion.layer import ConvertedLayer
from syncpipe.layers.conversion.names import distribute, in_order, index_keys
from syncpipe.layers.conversion.nodes import leaves_of, rebuilt
from syncpipe.layers.conversion.opening import Opening
from syncpipe.layers.conversion.signature import Signature
from syncpipe.layers.conversion.state import left_as_it_was
from syncpipe.layers.conversion.verify import verify as compared
from syncpipe.microbatch import NoChunk
from syncpipe.skip import Namespace

__all__ = ["Converted", "batch_input", "call_input", "sequential"]


class Converted(nn.Sequential):
    """The layers of a model that was converted; it is called as the model is."""

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


def call_input(layers: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the first layer gets where the layers are called with these arguments."""
    first = next(iter(layers._modules.values()), None)
    signature = first.signature if isinstance(first, ConvertedLayer) else None
    return _one_input(*args, **kwargs) if signature is None else signature.packed(args, kwargs)


def batch_input(layers: nn.Module, input: Any) -> Any:
    """What the first layer gets for an input of ``train_batch``: a tuple is arguments, a dict too."""
    first = next(iter(layers._modules.values()), None)
    signature = first.signature if isinstance(first, ConvertedLayer) else None
    return input if signature is None else signature.packed(*signature.arguments(input))


def _one_input(input: Any) -> Any:
    return input


def sequential(
    model: nn.Module, *sample_args: Any, verify: bool = True, **sample_kwargs: Any
) -> Converted:
    """Makes an ``nn.Sequential`` of any model, for ``Pipe``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"sequential() takes an nn.Module, not {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise ValueError(
            f"{type(model).__name__} has no parameters, so there is nothing to train and nothing "
            "to balance: give the model that has them"
        )
    name = type(model).__name__
    signature = Signature(model.forward, name, sample_args, sample_kwargs)
    leaves = leaves_of((sample_args, sample_kwargs))
    tensors = [leaf.tensor if isinstance(leaf, NoChunk) else leaf for leaf in leaves]
    tensors = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    with left_as_it_was(model):
        opening = Opening(model, signature, tensors)
        layers = _layers(model, opening)
        if verify:
            difference = compared(model, layers, *signature.call(tensors))
            if difference is not None:
                raise RuntimeError(difference)
    return layers.train(model.training)


def _layers(model: nn.Module, opening: Opening) -> Converted:
    recording = opening.recording
    pieces = cut(recording, model)
    writer, namespace = Writer(), Namespace()
    layers = [
        _layer(k, piece, pieces, writer, namespace, opening) for k, piece in enumerate(pieces)
    ]
    distribute(model, recording, layers, [piece.nodes for piece in pieces])
    return Converted(*layers)


def _layer(
    k: int,
    piece: Piece,
    pieces: list[Piece],
    writer: Writer,
    namespace: Namespace,
    opening: Opening,
) -> ConvertedLayer:
    output = opening.recording.output
    first, last = k == 0, piece.gives is None
    takes = opening.recording.inputs if first else [*piece.takes, *(n for _, n in piece.pops)]
    gives = output if last else (*(piece.gives or ()), *(n for _, n in piece.stashes))
    code = writer.layer(piece.nodes, takes, gives)
    return ConvertedLayer(
        code,
        writer.constants,
        takes=None if first else len(piece.takes),
        gives=None if last else len(piece.gives or ()),
        pops=tuple(name for name, _ in piece.pops),
        stashes=tuple(name for name, _ in piece.stashes),
        namespace=namespace,
        signature=opening.signature if first else None,
    )
