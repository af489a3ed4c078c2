"""``syncpipe.sequential``: any ``nn.Module`` as an ``nn.Sequential``.

model, sample -> trace -> inlined modules and leaves -> segments -> layers -> compare
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncpipe.compare import Comparison, compare
from syncpipe.data import flatten, leaf_names, places_of
from syncpipe.layers.conversion.inline import Inlined
from syncpipe.layers.conversion.layer import Holder, ModelNames, layers_of
from syncpipe.layers.conversion.signature import Signature, call_input
from syncpipe.layers.conversion.trace import Whole, guard
from syncpipe.state import unchanged

__all__ = ["Converted", "sequential"]

_GRADIENT = "the gradient of "
#: Makes the arguments of a call, each time anew.
_Arguments = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


class Converted(ModelNames, nn.Sequential):
    """The layers that :func:`sequential` made of a model; called as the model is.

    Its parameters and buffers have the names that they have in the model, and their order.

    Attributes:
        whole: the modules with others inside that are called as they are, with the line of their
            code and the reason. No layer begins inside of them.
    """

    whole: Sequence[Whole] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the forward of the model."""
        value = call_input(self, args, kwargs)
        for layer in self:
            value = layer(value)
        return value


def sequential(
    model: nn.Module, *sample_args: Any, verify: bool = True, **sample_kwargs: Any
) -> Converted:
    """Make an ``nn.Sequential`` of any model, for ``Pipe``::

        layers = syncpipe.sequential(model, input_ids, attention_mask=mask)
        pipe = Pipe(layers, balance="parameters", chunks=8)
        pipe(input_ids, attention_mask=mask).logits
        pipe.train_batch({"input_ids": ids, "attention_mask": mask}, labels, loss_fn=loss_fn)

    The model is run with the sample, a few times, and what it does is traced. Leaf modules (those
    without children, and those that cannot be traced) are called as they are: they are the very
    objects, with their hooks. Modules made of others are inlined: their ``forward`` becomes code
    between the calls, which ``print`` shows; it does not run any more, and hooks that are
    registered on them later do not, either. (Modules that have hooks already are not inlined.)

    What is traced holds for other sizes than those of the sample where the model was seen to do
    the same with them; otherwise a call with another size is refused. Flags and None count as they
    are in the sample. ``.train()``, ``.eval()`` and the devices of stages are followed. A dtype is
    not: call ``model.half()`` before.

    Args:
        model: any module. It is found as it was, and shares its modules with the layers.
        sample_args: arguments of one call of the model. Small tensors will do, of more than one
            sample. Those that have the batch size of the first one in dimension 0 are cut into
            micro-batches by a ``Pipe``, the others go whole to each; :class:`NoChunk` says so by
            hand. (A model on ``meta`` is run with values that take no memory, if these have some.)
        verify: compare outputs, gradients and buffers with those of the model, for the sample.
        sample_kwargs: keyword arguments, likewise. (One that is called ``verify`` cannot be given.)

    Returns:
        The layers, as many as there can be. Names in ``state_dict()`` and ``named_parameters()``
        are the model's, also in a ``Pipe`` of them. ``layers.whole`` lists the modules that were
        not inlined, with the reasons.

    Raises:
        TypeError: ``model`` is no module, or the sample does not fit its signature.
        ValueError: the model has no parameters, it fails with the sample, the sample does not show
            which tensors have the batch, an output has the batch in another dimension than 0, or
            the model cannot be cut; with the line of its code that is in the way.
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
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if verify and on_meta:
        raise ValueError(f"{name} is on meta, where nothing can be compared: say verify=False")
    signature = Signature(model.forward, name)
    sample = signature.take(sample_args, sample_kwargs)
    found = unchanged(model, partial(_inlined, model, signature, sample))
    layers = _layers(model, found)
    layers.whole = found.whole
    if verify:
        _check_layers(model, layers, partial(signature.call, sample))
    for note in found.notes:
        warnings.warn(note, stacklevel=2)
    for module in layers.modules():
        if isinstance(module, (Converted, Holder)):  # the others are as they were
            module.training = model.training
    return layers


def _layers(model: nn.Module, found: Inlined) -> Converted:
    runs = [found.runs[True], found.runs[False]]
    return Converted(*layers_of(model, runs, found.signature))


def _inlined(model: nn.Module, signature: Signature, sample: list[Tensor]) -> Inlined:
    if not any(tensor.is_meta for tensor in sample):
        _give_values(model)
    found = Inlined(model, signature, sample)
    # Guards of decisions that make no difference go. With one sample, say, something need not be
    # expanded to the batch. Where the layers give the same as the model all the same, nobody has to
    # be kept from it.
    for tensors, lines in found.unlike if not next(model.parameters()).is_meta else ():
        nodes = chain.from_iterable(run.nodes for run in found.runs.values())
        guards = [node for node in nodes if node.target is guard and node.args[2] in lines]
        asked: list[Any] = [node.args[0] for node in guards]
        if guards and all(node.target in (operator.eq, operator.ne) for node in asked):
            for node in guards:
                node.meta["pure"] = True
            without, call = _layers(model, found), partial(signature.call, tensors)
            try:
                same = all(_compared(model, without, call, mode).same for mode in (True, False))
            except Exception:  # a size that must be the sample's, or that the model refuses
                same = False
            for node in guards:
                node.meta["pure"] = same
    return found


def _give_values(model: nn.Module) -> None:
    """Puts values that take no memory in the place of tensors on ``meta``.

    Some models look at values, ``if mask.all()``. Here each tensor is a view of a few numbers,
    ``tensor[i, j, k] = numbers[i + j + k]``, as many as the sum of its sizes.
    """
    views: dict[int, Tensor] = {}
    for module, _, name, tensor in [place for place in places_of(model) if place[3].is_meta]:
        if id(tensor) not in views:
            steps = torch.arange(max(1, sum(tensor.shape))) % 17 - 8
            values = steps / 100 if tensor.is_floating_point() else steps * 0
            view: Any = values.to(tensor.dtype).as_strided(tensor.shape, (1,) * tensor.dim())
            if isinstance(tensor, nn.Parameter):
                view = torch.Tensor._make_subclass(type(tensor), view, tensor.requires_grad)
            view.__dict__.update(vars(tensor))
            views[id(tensor)] = view
        setattr(module, name, views[id(tensor)])


# Comparing


def _check_layers(model: nn.Module, layers: Converted, call: _Arguments) -> None:
    """Compares the layers with the model."""
    for training in (True, False):
        found = _compared(model, layers, call, training)
        if not found.same:
            outputs = [name for name in found.names if not name.startswith(_GRADIENT)]
            what = outputs[0] if outputs else found.names[-1]
            path = what.removeprefix(_GRADIENT).rpartition(".")[0]
            at = [k for k, layer in enumerate(layers) if path in dict(layer.named_modules())]
            shown = "" if outputs or not at else f", of layer {at[0]}:\n{layers[at[0]]}"
            raise RuntimeError(
                f"the layers do something else than {type(model).__name__}: {what} in "
                f"{'training' if training else 'evaluation'} differs ({found}){shown}\nDoes the "
                "model do the same in every call? If not, make it so, or move what does not into "
                "a module of its own (print the layers to see what they do)"
            )


def _compared(model: nn.Module, layers: nn.Module, call: _Arguments, training: bool) -> Comparison:
    """Compares outputs, buffers and, in training, gradients, with the same random numbers."""
    expected, actual = (
        unchanged(module, partial(_values, module, call, training)) for module in (model, layers)
    )
    return compare(actual, expected)


def _values(module: nn.Module, call: _Arguments, training: bool) -> dict[str, Any]:
    """What a run gives, by names for messages."""
    args, kwargs = call()
    with torch.set_grad_enabled(training):
        output = module.train(training)(*args, **kwargs)
    outputs, _ = flatten(output)
    found: dict[str, Any] = dict(zip(leaf_names("output", output), outputs, strict=True))
    saved = module.state_dict().keys()
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in saved:
            found[f"the buffer {name}"] = buffer.detach().clone()
    roots = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    inputs = {f"input {k}": leaf for k, leaf in enumerate(flatten((args, kwargs))[0])}
    leaves = {
        name: leaf
        for name, leaf in [*module.named_parameters(), *inputs.items()]
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    if training and roots and leaves:
        given = [  # differs from element to element
            ((torch.arange(t.numel(), device=t.device) % 17 - 8) / 8).reshape(t.shape).to(t.dtype)
            for t in roots
        ]
        grads = torch.autograd.grad(roots, list(leaves.values()), given, allow_unused=True)
        found |= {_GRADIENT + n: g for n, g in zip(leaves, grads, strict=True)}
    return found
