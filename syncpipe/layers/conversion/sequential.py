"""``syncpipe.sequential``: any ``nn.Module`` as an ``nn.Sequential``."""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncpipe.compare import Comparison, compare
from syncpipe.data import tensors_in
from syncpipe.layers.conversion.inline import LAYERS, Progress, Traced, Whole, traced
from syncpipe.layers.conversion.layer import (
    ConvertedLayer,
    Holder,
    distribute,
    in_order,
    index_keys,
)
from syncpipe.layers.conversion.segments import code_of, segments
from syncpipe.layers.conversion.signature import Signature
from syncpipe.layers.conversion.trace import COLLECTED, guard, leaves_of
from syncpipe.layers.on_meta import on_views
from syncpipe.skip import Namespace
from syncpipe.state import unchanged

__all__ = [
    "Converted",
    "batch_input",
    "call_arguments",
    "call_input",
    "model_signature",
    "sequential",
]

_GRADIENT = "the gradient of "
#: Makes the arguments of a call, each time anew.
_Arguments = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


class Converted(nn.Sequential):
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

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return in_order(self, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        index_keys(state_dict, prefix, self)
        super()._load_from_state_dict(state_dict, prefix, *args)


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
    if on_meta and not any(tensor.is_meta for tensor in tensors_in((sample_args, sample_kwargs))):
        again = partial(sequential, model, *sample_args, verify=False, **sample_kwargs)
        return on_views(model, again)
    signature = Signature(model.forward, name, sample_args, sample_kwargs)
    with Progress(name) as progress:
        layers, notes = unchanged(model, partial(_converted, model, signature, verify, progress))
    for note in notes:
        warnings.warn(note, stacklevel=2)
    for module in layers.modules():
        if isinstance(module, (Converted, Holder)):  # the others are as they were
            module.training = model.training
    return layers


def _converted(
    model: nn.Module, signature: Signature, verify: bool, progress: Progress
) -> tuple[Converted, list[str]]:
    sample = signature.take_sample()
    found = traced(model, signature, sample, progress)
    layers = _layers(model, found, signature)
    if _without_idle_guards(model, layers, found, signature):
        layers = _layers(model, found, signature)
    if verify:
        _check_layers(model, layers, partial(signature.call, sample))
    return layers, [*found.notes, *_large_modules(model, found)]


def _layers(model: nn.Module, found: Traced, signature: Signature) -> Converted:
    parts, namespace = segments(found.training, found.evaluation, model), Namespace()
    layers = []
    for k, segment in enumerate(parts):
        runs = (found.training, found.evaluation)
        codes = [code_of(segment, m, run.output) for m, run in enumerate(runs)]
        layers.append(ConvertedLayer(codes, segment, namespace, None if k else signature))
    distribute(model, layers, parts)
    made = Converted(*layers)
    made.whole = found.whole
    return made


def _without_idle_guards(
    model: nn.Module, layers: Converted, found: Traced, signature: Signature
) -> bool:
    """Takes out guards of decisions that make no difference; whether there are any.

    With one sample, say, something need not be expanded to the batch. Where the layers were seen to
    give the same as the model all the same, nobody has to be kept from it.
    """
    nodes = [node for run in (found.training, found.evaluation) for node in run.live]
    dropped = False
    for tensors in found.unlike if not next(model.parameters()).is_meta else ():
        lines: list[str] = []
        token = COLLECTED.set(lines)
        try:
            call = partial(signature.call, tensors)
            same = all(_compared(model, layers, call, mode).same for mode in (True, False))
        except Exception:  # a size that must be the sample's, or that the model refuses
            continue
        finally:
            COLLECTED.reset(token)
        guards = [node for node in nodes if node.target is guard and node.args[2] in lines]
        asked: list[Any] = [node.args[0] for node in guards]
        if same and guards and all(node.target in (operator.eq, operator.ne) for node in asked):
            for node in guards:
                node.meta["pure"] = dropped = True
    return dropped


def _large_modules(model: nn.Module, found: Traced) -> Iterator[str]:
    """Says which module that was not inlined has most of the model."""
    total = sum(parameter.numel() for parameter in model.parameters())
    calls = [node for node in found.training.root.nodes() if node.op == "call_module"]
    seconds = sum(node.meta["seconds"] for node in calls)
    for path, line, reason in found.whole:
        module = model.get_submodule(path)
        if isinstance(module, LAYERS):
            continue  # PyTorch's own, which nobody writes anew
        share = sum(parameter.numel() for parameter in module.parameters()) / total
        time = sum(node.meta["seconds"] for node in calls if node.target == path)
        if share > 0.5 or (seconds > 0.1 and time > seconds / 2):
            what = f"{share:.0%} of the parameters" if share > 0.5 else "more than half of the time"
            yield (
                f"{path} ({type(module).__name__}) is one layer and has {what}: "
                f"{reason}" + (f":\n  {line}\n" if line else ". ") + "Where that can be in a "
                "module of its own, the rest is cut (layers.whole lists all such modules)"
            )


# Comparing


def _check_layers(model: nn.Module, layers: Converted, call: _Arguments) -> None:
    """Compares the layers with the model.

    Raises:
        RuntimeError: they differ; with the layer where they begin to.
    """
    for training in (True, False):
        found = _compared(model, layers, call, training)
        if found.same:
            continue
        held = [{name for name, _ in layer.named_modules()} for layer in layers]
        outputs = [name for name in found.names if not name.startswith(_GRADIENT)]
        if outputs:
            shared = {id(m): path for path, m in model.named_modules() if path}
            located = _compared(model, layers, call, training, shared)
            path, what = located.names[0].partition("#")[0], outputs[0]
        else:
            what = found.names[-1]
            path = what.removeprefix(_GRADIENT).rpartition(".")[0]
        k = max((k for k, names in enumerate(held) if path in names), default=0)
        before = f", or in what layer {k - 1} hands to it" if k else ""
        shown = "\n".join(map(str, list(layers)[max(0, k - 1) : k + 1]))
        raise RuntimeError(
            f"the layers do something else than {type(model).__name__}: {what} in "
            f"{'training' if training else 'evaluation'} differs ({found}), first in layer {k}"
            f"{before}:\n{shown}\nDoes the model do the same in every call? If not, make it so, or "
            "move what is shown here into a module of its own"
        )


def _compared(
    model: nn.Module,
    layers: nn.Module,
    call: _Arguments,
    training: bool,
    shared: Mapping[int, str] | None = None,
) -> Comparison:
    """Compares outputs, buffers and, in training, gradients, with the same random numbers.

    Args:
        model: the model.
        layers: and its layers.
        call: makes the arguments.
        training: the mode.
        shared: the paths of modules whose outputs are compared before all else, in order.
    """
    expected, actual = (
        unchanged(module, partial(_values, module, call, training, shared or {}))
        for module in (model, layers)
    )
    return compare(actual, expected)


def _values(
    module: nn.Module, call: _Arguments, training: bool, shared: Mapping[int, str]
) -> dict[str, Any]:
    """What a run gives, by names for messages."""
    found: dict[str, Any] = {}
    handles = []
    for part in module.modules():
        if (path := shared.get(id(part))) is not None:

            def note(_: Any, args: Any, output: Any, path: str = path) -> None:
                for leaf in leaves_of(output):
                    found[f"{path}#{len(found)}"] = leaf

            handles.append(part.register_forward_hook(note))
    module.train(training)
    args, kwargs = call()
    try:
        with torch.set_grad_enabled(training):
            outputs = leaves_of(module(*args, **kwargs))
    finally:
        for handle in handles:
            handle.remove()
    found |= {f"output {k}": value for k, value in enumerate(outputs)}
    saved = module.state_dict().keys()
    found |= {
        f"the buffer {name}": buffer.detach().clone()
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if name in saved
    }
    roots = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    leaves: dict[str, Any] = {n: p for n, p in module.named_parameters() if p.requires_grad}
    for k, leaf in enumerate(leaves_of((args, kwargs))):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaves[f"input {k}"] = leaf
    if training and roots and leaves:
        given = torch.autograd.grad(
            roots, list(leaves.values()), list(map(_cotangent, roots)), allow_unused=True
        )
        found |= {_GRADIENT + n: g for n, g in zip(leaves, given, strict=True)}
    return found


def _cotangent(root: Tensor) -> Tensor:
    """A gradient that differs from element to element."""
    steps = torch.arange(root.numel(), device=root.device) % 17 - 8
    return (steps / 8).reshape(root.shape).to(root.dtype)


# Calling


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


def model_signature(layers: nn.Module) -> inspect.Signature | None:
    """The signature of the model that layers were made of; None if they were not converted."""
    signature = _signature(layers)
    return None if signature is None else signature.parameters


def _signature(layers: nn.Module) -> Signature | None:
    first = next(iter(layers._modules.values()), None)
    return first._signature if isinstance(first, ConvertedLayer) else None


def _one(input: Any) -> Any:
    return input


_one.__name__ = _one.__qualname__ = "forward"
