"""What people write who know another library, or who mistype: the error names what they meant."""

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
#: Arguments of other libraries, for which there is a sentence.
_ARGUMENTS = {
    **dict.fromkeys(("num_stages", "n_stages", "stages"), _STAGES),
    **dict.fromkeys(("micro_batches", "microbatches", "n_microbatches"), _CHUNKS),
    **dict.fromkeys(("num_microbatches", "gradient_accumulation_steps"), _CHUNKS),
    "activation_checkpoint_interval": "checkpoint= says which micro-batches, or which layers",
    "partition_method": "balance='parameters', 'uniform', 'type:regex' or 'time'",
    "loss_fn": "the loss function is given to pipe.train_batch(input, target, loss_fn=...)",
    "layers": "the layers are the first argument, Pipe(layers, ...)",
    "optimizer": _OPTIMIZER,
}  # fmt: skip
#: Other words for an argument, where the function has it.
_WORDS = {
    **dict.fromkeys(("criterion", "loss", "loss_function", "objective"), "loss_fn"),
    **dict.fromkeys(("inputs", "x", "batch", "data"), "input"),
    **dict.fromkeys(("targets", "label", "labels", "y"), "target"),
    **dict.fromkeys(("loader", "dataloader", "data_loader", "dataset"), "data_iter"),
    **dict.fromkeys(("device", "device_ids"), "devices"),
    **dict.fromkeys(("scaler", "gradscaler"), "grad_scaler"),
    **dict.fromkeys(("recompute", "rematerialize", "remat"), "checkpoint"),
    **{"model": "module", "accumulation_steps": "accumulate", "reduction": "loss_reduction"},
}
_OF_THE_PIPE = {"balance", "devices", "replicas", "chunks", "checkpoint"}
_MADE_SO = "it is decided when a pipe is made: Pipe([*pipe], pipe.balance, {}=..., ...)"
_VALUES = "it is for layers that Pipe(...) makes: pipe.apply(init_fn) sets those that are there"
#: Arguments of ``Pipe`` that are no attributes.
_SETTINGS = {
    **{name: _MADE_SO.format(name) for name in ("deferred_batch_norm", "unpack")},
    **dict.fromkeys(("init_fn", "seed"), _VALUES),
    "sample": "it is what Pipe(..., balance='time') measures with: set pipe.balance = "
    "syncpipe.balance.balance_by_time(n, pipe[:], sample)",
    "module": "a pipe is a list of its layers: pipe[k] = layer replaces one",
    "partitions": "pipe.balance = [...] cuts the layers anew, and pipe[k] = layer replaces one",
}
_ATTRIBUTES = {
    **_SETTINGS,
    "save_checkpoint": "torch.save(pipe.state_dict(), path), whose keys no balance changes",
    "load_checkpoint": "pipe.load_state_dict(torch.load(path))",
    "gradient_accumulation_steps": "pipe.chunks is the number of micro-batches",
    "backward": "pipe.train_batch runs backward by itself; after pipe(input) it is loss.backward()",
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
    """Has a method refuse arguments that it does not have by a sentence that names what is meant.

    Its signature stays as it is, for readers, editors and type checkers.
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
                f"{name} takes {' and '.join(placed)} by position, and everything else by name, "
                f"but was given {len(args) - 1} arguments: write "
                f"{name}({', '.join(placed)}, {named[0]}=...)"
            )
        return uncompiled(function)(*args, **kwargs)

    return call


def _unknown(function: str, name: str, names: set[str]) -> TypeError:
    if name in _ARGUMENTS and not names & {"optimizer", name}:
        answer = _ARGUMENTS[name]
    elif (word := _WORDS.get(name.lower())) in names:
        answer = f"did you mean {word}=?"
    else:
        answer = _closest(name, names, "did you mean {}=?")
    if not answer and function != "Pipe" and name in _OF_THE_PIPE:
        answer = f"it is the pipe's: set pipe.{name} = ..."
    text = f"{function}() got an unexpected keyword argument {name!r}"
    return TypeError(f"{text}: {answer}" if answer else text)


def _closest(name: str, names: Iterable[str], answer: str) -> str:
    found = get_close_matches(name.lower(), names, 1, 0.75)
    return answer.format(found[0]) if found else ""


def unknown_attribute(name: str, names: Iterable[str], error: AttributeError) -> AttributeError:
    """The error for an attribute that a pipe does not have."""
    if (answer := _ATTRIBUTES.get(name)) is None and not name.startswith("_"):
        answer = _closest(name, names, "did you mean pipe.{}?")
    return AttributeError(f"{error}: {answer}", name=name) if answer else error


def check_setting(name: str, value: Any) -> None:
    """Refuses to set what is an argument of ``Pipe``, and no attribute that would be followed."""
    if name in _SETTINGS:
        raise AttributeError(f"pipe.{name} = {value!r:.60} would do nothing: {_SETTINGS[name]}")


class FixedList(list[_T]):
    """A list that a pipe shows, and that is no place to change the pipe; copies are plain lists.

    Args:
        name: the attribute that it is.
    """

    def __init__(self, name: str, values: Iterable[_T]) -> None:
        super().__init__(values)
        self._name = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            f"pipe.{self._name} cannot be changed in place: {_SETTINGS[self._name]}"
            if self._name in _SETTINGS
            else f"pipe.{self._name} cannot be changed in place: set it as a whole, "
            f"pipe.{self._name} = [...]; list(pipe.{self._name}) is one to edit"
        )

    def __reduce__(self) -> Any:
        return list, (list(self),)


class FixedLayers(dict[str, Any]):
    """The layers of a partition, by name; those of its pipe, which alone can change them."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "the layers of pipe.partitions[j] are the pipe's, which would go on with its own: put "
            "another one in the place of one by pipe[k] = layer; for more or fewer of them make "
            "another Pipe of [*pipe]"
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
#: So that ``torch.load`` reads what of a pipe is in a checkpoint.
torch.serialization.add_safe_globals([list])


def refuse_backward(results: Any) -> Any:
    """What ``train_batch`` returns, with a loss whose ``backward()`` says what there is to do.

    Copies, files and whatever is computed of the loss are plain tensors.
    """
    loss: Tensor = results[0] if isinstance(results, tuple) else results
    reference = weakref.ref(loss)  # a cycle would keep the loss until the garbage collector runs

    def backward(*args: Any, **kwargs: Any) -> None:
        held = reference()
        if held is None or not held.requires_grad:
            raise RuntimeError(
                "train_batch has run backward already, and gradients are in .grad: leave out "
                "loss.backward() and call optimizer.step()"
            )
        Tensor.backward(held, *args, **kwargs)  # type: ignore[no-untyped-call]  # something was added to it in place

    vars(loss).update(backward=backward, __getstate__=_nothing)
    return results


def _nothing() -> None:
    """The state of a tensor beside its values, for pickle."""


@contextmanager
def target_hint(call: str, input: Any, target: Any) -> Iterator[None]:
    """Notes on an exception of a layer or a loss function that the target may be in the input."""
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
    """Warns of a metric that counts, for it comes back as a mean over the micro-batches."""
    first = values[0]
    if isinstance(first, Tensor):
        counts = not (first.dim() or first.is_floating_point() or first.is_complex())
        counts = counts and first.dtype is not torch.bool
    else:
        counts = isinstance(first, Integral) and not isinstance(first, bool)
    if counts and len(values) > 1:
        warnings.warn(
            f"the metric {name!r} is an integer, and what comes back is the mean over "
            f"{len(values)} micro-batches, as of the loss: return a rate, and no count; or a "
            "tensor of one dimension, to have a list of them",
            stacklevel=caller_stacklevel(),
        )


def caller_stacklevel() -> int:
    """The stack level, for warnings, of whoever called the package."""
    inside = str(Path(__file__).parent), str(Path(torch.__file__).parent)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level
