"""Errors for misspelt names and names of other libraries, which name the right one."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from syncpipe.runtime.errors import annotate
from syncpipe.runtime.thread_state import uncompiled

__all__ = [
    "FixedLayers", "FixedList", "caller_stacklevel", "check_setting", "refuse_backward",
    "target_hint", "unknown_attribute", "warn_of_counts", "with_hints",
]  # fmt: skip

_P = ParamSpec("_P")
_T = TypeVar("_T")
_R = TypeVar("_R")

_LAYERS = "make another Pipe of the layers: layers = [*pipe]; pipe[k] = layer replaces one"
_OPTIMIZER = "the optimizer is yours: call optimizer.step() after train_batch"
_STAGES = "there are as many stages as in balance=[...], or in devices= with balance='uniform'"
_CHUNKS = "the number of micro-batches is chunks="
#: Answers to arguments of other libraries.
_ARGUMENTS = {
    **dict.fromkeys(("num_stages", "n_stages", "stages", "topology"), _STAGES),
    **dict.fromkeys(("worker_map", "group", "style"), "a pipe is one process: devices= names all"),
    "input_device": "move the input there: input.to(pipe.devices[0])",
    "split_spec": "balance=[...] is the number of layers of each stage",
    **dict.fromkeys(("micro_batches", "microbatches", "n_microbatches"), _CHUNKS),
    **dict.fromkeys(("num_microbatches", "gradient_accumulation_steps"), _CHUNKS),
    "activation_checkpoint_interval": "checkpoint= selects micro-batches, or layers",
    "partition_method": "balance='parameters', 'uniform', 'type:regex' or 'time'",
    "loss_fn": "the loss function is given to pipe.train_batch(input, target, loss_fn=...)",
    "layers": "the layers are the first argument, Pipe(layers, ...)",
    "optimizer": _OPTIMIZER,
}  # fmt: skip
#: Synonyms of arguments, used if the function has the argument.
_SYNONYMS = {
    **dict.fromkeys(("criterion", "loss", "loss_function", "objective"), "loss_fn"),
    **dict.fromkeys(("inputs", "x", "batch", "data"), "input"),
    **dict.fromkeys(("targets", "label", "labels", "y"), "target"),
    **dict.fromkeys(("loader", "dataloader", "data_loader", "dataset"), "data_iter"),
    **dict.fromkeys(("device", "device_ids"), "devices"),
    **dict.fromkeys(("scaler", "gradscaler"), "grad_scaler"),
    **dict.fromkeys(("recompute", "rematerialize", "remat"), "checkpoint"),
    **{"model": "module", "accumulation_steps": "accumulate", "reduction": "loss_reduction"},
}
_PIPE_ATTRIBUTES = {"balance", "devices", "replicas", "chunks", "checkpoint"}
_FIXED = "it is fixed when a pipe is made: Pipe([*pipe], pipe.balance, {}=..., ...)"
_ON_BUILD = "it is for layers that Pipe(...) builds: pipe.apply(init_fn) initializes existing ones"
#: Answers for arguments of ``Pipe`` that are not attributes.
_SETTINGS = {
    **{name: _FIXED.format(name) for name in ("deferred_batch_norm", "unpack")},
    **dict.fromkeys(("init_fn", "seed"), _ON_BUILD),
    "sample": "Pipe(..., balance='time') measures with it: set pipe.balance = "
    "syncpipe.balance.balance_by_time(n, pipe[:], sample)",
    "module": "a pipe is a list of its layers: pipe[k] = layer replaces one",
    "partitions": "pipe.balance = [...] moves layers across stages; pipe[k] = layer replaces one",
}
_ATTRIBUTES = {
    **_SETTINGS,
    "save_checkpoint": "torch.save(pipe.state_dict(), path), with the same keys in any balance",
    "load_checkpoint": "pipe.load_state_dict(torch.load(path))",
    "gradient_accumulation_steps": "pipe.chunks is the number of micro-batches",
    "backward": "pipe.train_batch runs backward itself; after pipe(input) call loss.backward()",
    "step": _OPTIMIZER,
    "num_stages": "len(pipe.balance)",
    **dict.fromkeys(("append", "extend", "insert", "pop"), _LAYERS),
    "device": "pipe.devices has one for each stage; inputs belong on pipe.devices[0]",
    "stages": "pipe.partitions has the layers of each stage, pipe.devices their devices",
    "layers": "a pipe is a list of its layers: [*pipe], pipe[k], len(pipe)",
    "evaluate": "pipe.eval_batch(input, target, loss_fn=...), or without loss_fn for the outputs",
    "verify": "syncpipe.verify(pipe, input, target, loss_fn=...)",
}


def with_hints(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps a method so that errors about unknown arguments name the right one.

    The signature stays, for readers, editors and type checkers.
    """
    parameters = [*inspect.signature(function).parameters.values()][1:]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    placed = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = {*placed, *named}
    name = function.__qualname__.removeprefix("Pipe.").replace("__init__", "Pipe")

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not kwargs.keys() <= names:
            raise _unknown(name, next(key for key in kwargs if key not in names), names)
        if len(args) > len(placed) + 1:
            raise TypeError(
                f"{name} takes {' and '.join(placed)} by position, and all others by name, "
                f"but was given {len(args) - 1} arguments: write "
                f"{name}({', '.join(placed)}, {named[0]}=...)"
            )
        return uncompiled(function)(*args, **kwargs)

    return call


def _unknown(function: str, name: str, names: set[str]) -> TypeError:
    if name in _ARGUMENTS and not names & {"optimizer", name}:
        answer = _ARGUMENTS[name]
    elif (word := _SYNONYMS.get(name.lower())) in names:
        answer = f"did you mean {word}=?"
    else:
        answer = _closest(name, names, "did you mean {}=?")
    if not answer and function != "Pipe" and name in _PIPE_ATTRIBUTES:
        answer = f"it is an attribute of the pipe: set pipe.{name} = ..."
    text = f"{function}() got an unexpected keyword argument {name!r}"
    return TypeError(f"{text}: {answer}" if answer else text)


def _closest(name: str, names: Iterable[str], answer: str) -> str:
    found = get_close_matches(name.lower(), names, 1, 0.75)
    return answer.format(found[0]) if found else ""


def unknown_attribute(name: str, owner: type, error: AttributeError) -> AttributeError:
    if (answer := _ATTRIBUTES.get(name)) is None and not name.startswith("_"):
        answer = _closest(name, dir(owner), "did you mean pipe.{}?")
    return AttributeError(f"{error}: {answer}", name=name) if answer else error


def check_setting(name: str, value: Any) -> None:
    """Raises AttributeError if ``name`` is an argument of ``Pipe`` and not an attribute."""
    if name in _SETTINGS:
        raise AttributeError(f"pipe.{name} = {value!r:.60} would do nothing: {_SETTINGS[name]}")


class FixedList(list[_T]):
    """An immutable list, the value of the attribute ``name`` of a pipe; copies are plain lists."""

    def __init__(self, name: str, values: Iterable[_T]) -> None:
        super().__init__(values)
        self._name = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            f"pipe.{self._name} cannot be changed in place: {_SETTINGS[self._name]}"
            if self._name in _SETTINGS
            else f"pipe.{self._name} cannot be changed in place: edit list(pipe.{self._name}), and "
            f"set pipe.{self._name} = [...]"
        )

    def __reduce__(self) -> Any:
        return list, (list(self),)


class FixedLayers(dict[str, Any]):
    """The layers of a partition, by name; immutable, because the pipe alone can change them."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "pipe.partitions[j] cannot be changed, as that would not change the pipe: replace a "
            "layer by pipe[k] = layer, or make another Pipe for more or fewer layers"
        )

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)


for _kind in (FixedList, FixedLayers):
    for _name in (
        "__setitem__", "__delitem__", "__iadd__", "__imul__", "__ior__", "append", "clear",
        "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update",
    ):  # fmt: skip
        if hasattr(_kind, _name):
            setattr(_kind, _name, _kind._refuse)
#: ``torch.load`` reads the lists of a pipe in a checkpoint.
torch.serialization.add_safe_globals([list])


def refuse_backward(results: Any) -> Any:
    """The results of ``train_batch``, with a loss whose ``backward()`` raises the next step to do.

    Copies, saved losses and tensors computed from the loss are plain tensors.
    """
    loss: Tensor = results[0] if isinstance(results, tuple) else results
    reference = weakref.ref(loss)  # a cycle would keep the loss until garbage collection

    def backward(*args: Any, **kwargs: Any) -> None:
        held = reference()
        if held is None or not held.requires_grad:
            raise RuntimeError(
                "train_batch has run backward already, and gradients are in .grad: leave out "
                "loss.backward() and call optimizer.step()"
            )
        Tensor.backward(held, *args, **kwargs)  # type: ignore[no-untyped-call]  # changed in place

    vars(loss).update(backward=backward, __getstate__=lambda: None)  # for pickle: values only
    return results


@contextmanager
def target_hint(call: str, input: Any, target: Any) -> Iterator[None]:
    """Adds a note to an exception if the target is missing and may be part of the input."""
    try:
        yield
    except Exception as error:
        hint = ""
        if isinstance(input, Mapping):
            hint = f"one of {', '.join(map(repr, input))}, name it: {call}(batch, target='labels'"
        elif isinstance(input, tuple | list) and len(input) > 1:
            hint = f"its last part: {call}("
            hint += "*pair" if len(input) == 2 else "batch[:-1], batch[-1]"
        if hint and target is None and hasattr(error, "__notes__"):
            kind = f"{type(input).__name__} of {len(input)}"
            note = f"the input is a {kind}, and there is no target. If that is {hint}, loss_fn=...)"
            annotate(error, note)
        raise


def warn_of_counts(name: str, values: Sequence[Any]) -> None:
    """Warns about an integer metric, because metrics are averaged over the micro-batches."""
    first = values[0]
    if isinstance(first, Tensor):
        counts = not (first.dim() or first.is_floating_point() or first.is_complex())
        counts = counts and first.dtype is not torch.bool
    else:
        counts = isinstance(first, Integral) and not isinstance(first, bool)
    if counts and len(values) > 1:
        warnings.warn(
            f"the metric {name!r} is an integer, and is averaged over {len(values)} micro-batches "
            "as the loss is: return a rate, not a count, or a tensor of one dimension to get all "
            "values",
            stacklevel=caller_stacklevel(),
        )


def caller_stacklevel() -> int:
    """The ``stacklevel`` of warnings at the innermost caller outside of the package and PyTorch."""
    inside = str(Path(__file__).parent), str(Path(torch.__file__).parent)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level
