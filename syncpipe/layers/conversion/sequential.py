"""``syncpipe.sequential``: any ``nn.Module`` as an ``nn.Sequential``."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncpipe.data import tensors_in
from syncpipe.layers.conversion.layer import (
    ConvertedLayer,
    Holder,
    distribute,
    in_order,
    index_keys,
)
from syncpipe.layers.conversion.leaves import LAYERS, Progress, Traced, Whole, live, traced
from syncpipe.layers.conversion.segments import Segment, code_of, segments
from syncpipe.layers.conversion.signature import Signature, equal
from syncpipe.layers.conversion.trace import COLLECTED, guard, leaves_of
from syncpipe.layers.on_meta import on_views
from syncpipe.skip import Namespace
from syncpipe.skip.store import use_store
from syncpipe.state import unchanged

__all__ = ["Converted", "batch_input", "call_arguments", "call_input", "sequential"]

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
    """Makes an ``nn.Sequential`` of any model, for ``Pipe``::

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
    parts, layers = _layers(model, found, signature)
    if _without_idle_guards(model, layers, found, signature):
        parts, layers = _layers(model, found, signature)
    if verify:
        _check_layers(model, layers, found, parts, partial(signature.call, sample))
    return layers, [*found.notes, *_large_modules(model, found)]


def _layers(
    model: nn.Module, found: Traced, signature: Signature
) -> tuple[list[Segment], Converted]:
    parts, namespace, layers = segments(found.trace, model), Namespace(), []
    for k, segment in enumerate(parts):
        code = code_of(segment, found.trace.output)
        layers.append(ConvertedLayer(*code, segment, namespace, None if k else signature))
    distribute(model, layers, parts)
    made = Converted(*layers)
    made.whole = found.whole
    return parts, made


def _without_idle_guards(
    model: nn.Module, layers: Converted, found: Traced, signature: Signature
) -> bool:
    """Takes out guards of decisions that make no difference; whether there are any.

    With one sample, say, something need not be expanded to the batch. Where the layers were seen to
    give the same as the model all the same, nobody has to be kept from it.
    """
    on_meta = next(model.parameters()).is_meta
    dropped = False
    for tensors in [] if on_meta else found.unlike:
        call = partial(signature.call, tensors)
        token = COLLECTED.set([])
        try:
            same = _difference(model, layers, call, training=False) is None
            lines = COLLECTED.get() or []
        except ValueError:  # a size that must be the sample's
            same, lines = False, []
        finally:
            COLLECTED.reset(token)
        guards = [n for n in live(found.trace) if n.target is guard and n.args[2] in lines]
        asked: list[Any] = [node.args[0] for node in guards]
        if same and guards and all(n.target in (operator.eq, operator.ne) for n in asked):
            for node in guards:
                node.meta["pure"] = dropped = True
    return dropped


def _large_modules(model: nn.Module, found: Traced) -> Iterator[str]:
    """Says which module that was not inlined has most of the model."""
    total = sum(parameter.numel() for parameter in model.parameters())
    calls = [node for node in found.trace.root.nodes() if node.op == "call_module"]
    seconds = sum(node.meta["seconds"] for node in calls)
    for path, line, reason in found.whole:
        if isinstance(model.get_submodule(path), LAYERS):
            continue  # PyTorch's own, which nobody writes anew
        inside = list(model.get_submodule(path).parameters())
        share = sum(parameter.numel() for parameter in inside) / total
        time = sum(node.meta["seconds"] for node in calls if node.target == path)
        slow = seconds > 0.1 and time > seconds / 2
        if share > 0.5 or slow:
            what = f"{share:.0%} of the parameters" if share > 0.5 else "more than half of the time"
            yield (
                f"{path} ({type(model.get_submodule(path)).__name__}) is one layer and has {what}: "
                f"{reason}" + (f":\n  {line}\n" if line else ". ") + "Where that can be in a "
                "module of its own, the rest is cut (layers.whole lists all such modules)"
            )


# Comparing


def _check_layers(
    model: nn.Module, layers: Converted, found: Traced, parts: list[Segment], call: _Arguments
) -> None:
    """Compares the layers with the model.

    Raises:
        RuntimeError: they differ; with the first layer that does.
    """
    for training in (True, False):
        what = _difference(model, layers, call, training=training)
        if what is None:
            continue
        holders = [k for k, layer in enumerate(layers) if what in layer.state_dict()]
        if what == "output":
            what = f"the output in {'training' if training else 'evaluation'}"
            again = unchanged(model, partial(found.again, training))
            input = call_input(layers, *call())
            first = unchanged(layers, partial(_first_layer, layers, parts, again, input))
        else:
            what, first = f"the gradient of {what}", holders[-1] if holders else 0
        raise RuntimeError(
            f"the layers do something else than {type(model).__name__}: {what} differs, first in "
            f"layer {first}:\n{layers[first]}\nDoes the model do the same in every call? If not, "
            "make it so, or move what is shown here into a module of its own"
        )


def _difference(
    model: nn.Module, layers: nn.Module, call: _Arguments, *, training: bool
) -> str | None:
    """What differs between a model and its layers; None: nothing.

    Outputs, buffers and, in training, gradients, with the same random numbers.

    Returns:
        ``"output"`` (or a buffer), or the last parameter whose gradient differs.
    """
    model.train(training)
    layers.train(training)
    expected, wanted = unchanged(model, partial(_run, model, call, training))
    actual, gradients = unchanged(layers, partial(_run, layers, call, training))
    if len(actual) != len(expected) or not all(map(_close, actual, expected)):
        return "output"
    differing = [name for name in wanted if not _close(wanted[name], gradients.get(name))]
    return differing[-1] if differing else None


def _run(module: nn.Module, call: _Arguments, training: bool) -> tuple[list[Any], dict[str, Any]]:
    """The outputs, with the buffers after them; and gradients by name."""
    args, kwargs = call()
    with torch.set_grad_enabled(training):
        outputs = leaves_of(module(*args, **kwargs))
    saved = module.state_dict().keys()
    named = dict(pair for pair in module.named_buffers(remove_duplicate=False) if pair[0] in saved)
    found = [*outputs, *(named[name] for name in sorted(named))]
    values = [value.detach().clone() if isinstance(value, Tensor) else value for value in found]
    roots = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    leaves: dict[str, Any] = {n: p for n, p in module.named_parameters() if p.requires_grad}
    for k, leaf in enumerate(leaves_of((args, kwargs))):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaves[f"input {k}"] = leaf
    if not training or not roots or not leaves:
        return values, {}
    given = torch.autograd.grad(
        roots, list(leaves.values()), list(map(_cotangent, roots)), allow_unused=True
    )
    return values, dict(zip(leaves, given, strict=True))


def _cotangent(root: Tensor) -> Tensor:
    """A gradient that differs from element to element."""
    steps = torch.arange(root.numel(), device=root.device) % 17 - 8
    return (steps / 8).reshape(root.shape).to(root.dtype)


def _close(a: Any, b: Any) -> bool:
    """Whether two values are the same, to rounding."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return equal(a, b)
    try:
        torch.testing.assert_close(a, b, equal_nan=True)
    except AssertionError:
        return False
    return True


def _first_layer(layers: Converted, parts: list[Segment], trace: Any, input: Any) -> int:
    """The index of the first layer that gives another value than the model did in a trace."""
    values = {node.meta["key"]: node.meta["value"] for node in live(trace)}
    skips: dict[Any, Any] = {}
    for k, (layer, segment) in enumerate(zip(layers, parts, strict=True)):
        assert isinstance(layer, ConvertedLayer)
        with use_store(skips):
            input = layer(input)
        if segment.gives is None:
            break
        given = [input] if len(segment.gives) == 1 else list(input)
        given += [skips[layer._skip_namespaces[name], name] for name in layer._syncpipe_skips.stash]
        pairs = zip(given, segment.given, strict=True)
        if not all(_close(value, values.get(node.meta["key"])) for value, node in pairs):
            return k
    return len(layers) - 1


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


def _signature(layers: nn.Module) -> Signature | None:
    first = next(iter(layers._modules.values()), None)
    return first._signature if isinstance(first, ConvertedLayer) else None


def _one(input: Any) -> Any:
    return input


_one.__name__ = _one.__qualname__ = "forward"
