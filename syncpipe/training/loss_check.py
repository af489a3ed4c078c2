"""Checks that the losses of micro-batches combine to the loss of the mini-batch.

Weights by samples are wrong for a mean over unmasked targets, or over anything else than samples.
No weights are right for a loss that compares samples. Gradients are then wrong, too. The check
keeps outputs of some micro-batches until the end of a call and calls ``loss_fn`` once more, with
all of them at once. It runs in calls 1, 2, 4, 8, ... of a loss function, because the first batches
may have no padding.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Collection
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from syncpipe.compare import SIMPLE
from syncpipe.data.batches import gather
from syncpipe.data.trees import flatten, map_tensors, tensors_in, unflatten
from syncpipe.hints import caller_stacklevel
from syncpipe.runtime.random_numbers import with_cpu_generator
from syncpipe.state import restoring_module
from syncpipe.training.loss import Objective

_MAX_KEPT_BYTES = 2**26  #: of outputs, but two micro-batches are always kept
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}  #: relative to the loss
_MAX_COUNTS = 32  #: entries of LossCounts, three for each loss function
_WEIGHT_HINT = (
    "weight=, for example weight=lambda target: (target != -100).sum(), or (loss, weight) from "
    "loss_fn"
)
_MODEL_LOSS = (
    "the model computes the loss of each micro-batch (output.loss): with masked targets their mean "
    "is not the loss of the mini-batch, and gradients are wrong likewise. Return logits from the "
    "model and compute the loss in loss_fn (F.cross_entropy weights masked targets correctly), or "
    f"give {_WEIGHT_HINT}. If micro-batches have equal weights: verify=False"
)


class Finding(NamedTuple):
    """The message of a check: the loss is ``wrong``, or it could not be checked."""

    text: str
    wrong: bool


class LossCounts:
    """Counts the calls with each loss function, to decide when to check it.

    Two functions count as one if they are the same object, or if their code and the values that
    they close over are the same objects, or equal numbers or strings. Of functions with the same
    code and other values the 1st, 2nd, 4th, ... is checked. Holds no function alive.
    """

    def __init__(self) -> None:
        # key of a function -> weak references, which keep the ids in the key valid; and the count
        self._counts: dict[Any, tuple[Any, float]] = {}

    def check(
        self, objective: Objective, targets: list[Any] | None, verify: bool | None
    ) -> LossCheck | None:
        """The check of the loss function in this call, if it is due or asked for."""
        function = objective.loss_fn.function
        if verify is False:
            self._add(function, math.inf)
        if verify is False or objective.m == 1 or (verify is None and objective.loss_fn.exact):
            return None
        if verify is None:
            _, code, *keys = _keys(function)
            made, before = self._count(code), max(map(self._count, keys))
            following = (before or made) + 1
            if made == math.inf or int(following) & int(following) - 1:
                self._add(function, 1)
                return None
        return LossCheck(objective, targets, asked=bool(verify))

    def compare(self, check: LossCheck, common: Collection[int] = (), *, draws: bool) -> None:
        """Runs a check, unless the loss ``draws`` random numbers; warns once for each function.

        ``common`` has the indices of output leaves that are the same in every micro-batch.
        """
        function = check.objective.loss_fn.function
        found = None if draws else check.compare(common)
        if found is not None:
            references, code, *_ = _keys(function)
            unchecked = "unchecked", code
            if found.wrong or unchecked not in self._counts:
                warnings.warn(found.text, stacklevel=caller_stacklevel())
            if not found.wrong:
                self._counts[unchecked] = references, 1
        self._add(function, math.inf if found is not None and found.wrong else 1)

    def _count(self, key: Any) -> float:
        return self._counts[key][1] if key in self._counts else 0

    def _add(self, function: Any, more: float) -> None:
        references, code, *keys = _keys(function)
        before = max(map(self._count, keys))
        made = self._count(code) + (more if not before or more == math.inf else 0)
        for key, count in ((code, made), *((key, before + more) for key in keys)):
            self._counts.pop(key, None)  # moves it to the end
            self._counts[key] = references, count
        while len(self._counts) > _MAX_COUNTS:
            del self._counts[next(iter(self._counts))]


def _keys(function: Any) -> tuple[Any, Any, Any, Any]:
    """References to a function and its parts; the keys of its code, its object, its values."""
    code, values = _parts(function)
    references = [_reference(part) for part in (function, *code, *values)]
    one, *each = [(type(r), r) if isinstance(r, SIMPLE) else id(r) for r in references]
    return references, ("code", *each[: len(code)]), ("object", one), ("values", *each)


def _parts(function: Any) -> tuple[list[Any], list[Any]]:
    """The code of a function, and the values that it closes over or has as arguments."""
    if isinstance(function, FunctionType):
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        keywords = (function.__kwdefaults__ or {}).values()
        return [function.__code__], [*cells, *(function.__defaults__ or ()), *keywords]
    if isinstance(function, MethodType):
        code, values = _parts(function.__func__)
        return [*code, type(function.__self__)], [*values, function.__self__]
    if isinstance(function, partial):
        code, values = _parts(function.func)
        return code, [*values, *function.args, *function.keywords.values()]
    builtin = isinstance(function, BuiltinFunctionType)
    return [function if builtin else type(function)], [function]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _reference(part: Any) -> Any:
    if isinstance(part, SIMPLE):
        return part
    try:
        return weakref.ref(part)
    except TypeError:  # a list, for example
        return object()


class LossCheck:
    """Compares the loss of a mini-batch with the combined loss of its micro-batches.

    If the caller ``asked`` for it, an exception of the check is raised: from ``loss_fn``, or
    because outputs cannot be concatenated.
    """

    def __init__(self, objective: Objective, targets: list[Any] | None, *, asked: bool) -> None:
        self.objective, self._asked = objective, asked
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._bytes = 0
        # A leaf that all micro-batches share was not cut, so it is not concatenated.
        pair = (targets or [(), ()])[:2]
        first, second = [flatten(target, batches=True)[0] for target in pair]
        self._common = [a is b for a, b in zip(first, second, strict=False)]

    def keep(self, i: int, output: Any, target: Any) -> tuple[Any, Any] | None:
        """Keeps a copy of the arguments of the loss function, up to a number of bytes."""
        size = sum(tensor.nbytes for tensor in tensors_in(output))
        if len(self._kept) < 2 or self._bytes + size <= _MAX_KEPT_BYTES:
            self._bytes += size
            self._kept[i] = map_tensors(lambda ts: [t.detach().clone() for t in ts], output), target
        return self._kept.get(i)

    @torch.no_grad()
    def compare(self, common: Collection[int] = ()) -> Finding | None:
        """Reports a loss that is wrong by more than rounding, or why it cannot be checked."""
        objective = self.objective
        self._common_outputs = common  # as in ``gather``
        if objective.returns_weights and not self._asked:
            return None  # the user chose the weights
        counted = objective.is_sum or objective.loss_fn.weigh is not None
        if self._made_by_model():
            return None if counted else Finding(_MODEL_LOSS, True)
        error: Exception | None = None
        wrong: float | None = None
        for along in self._batch_dimensions():
            try:
                found = self._loss_of_all(along)
            except Exception as failed:
                error = error or failed
                continue
            if (
                type(found) is not Tensor
                or found.device.type == "meta"
                or self._agrees(found, along)
            ):
                return None
            wrong = float(found) if wrong is None else wrong
        if wrong is not None:
            return Finding(self._mismatch_message(wrong), True)
        if self._asked and error is not None:
            raise error
        return None if counted or error is None else Finding(_unchecked_message(error), False)

    def _made_by_model(self) -> bool:
        """Whether the loss is one of the outputs, and loss_fn does not compute it from others."""
        i, (output, target) = next(iter(self._kept.items()))
        loss = self.objective.records(i)[0]
        if not any(t.dim() == 0 and t.equal(loss) for t in tensors_in(output)):
            return False
        others = map_tensors(
            lambda ts: [t if t.dim() else torch.full_like(t, math.nan) for t in ts], output
        )
        try:
            return not math.isfinite(self._call_loss_fn((others, target)))
        except Exception:
            return True

    def _batch_dimensions(self) -> list[list[int]]:
        """Candidates for the batch dimension of each output tensor, the likeliest first."""
        sizes = [self.objective.sizes[i] for i in self._kept]
        columns = zip(*(tensors_in(output) for output, _ in self._kept.values()), strict=False)
        fitting = [
            [
                d
                for d in range(min(t.dim() for t in column))
                if [t.shape[d] for t in column] == sizes
            ]
            or [0]
            for column in columns
        ]
        found = [[fit[0] for fit in fitting], [fit[-1] for fit in fitting], [0] * len(fitting)]
        return [along for k, along in enumerate(found) if along not in found[:k]]

    def _loss_of_all(self, along: list[int]) -> Any:
        """The loss of all micro-batches at once; ``along`` has the batch dimensions of outputs.

        Outputs without dimensions are combined as losses are.
        """
        outputs, targets = zip(*self._kept.values(), strict=True)
        common, given = self._common_outputs, enumerate(flatten(outputs[0], batches=True)[0])
        is_common_leaf = [k in common for k, leaf in given for _ in tensors_in(leaf)]

        def samples_first(tensors: list[Tensor]) -> list[Tensor]:
            each = zip(tensors, along, is_common_leaf, strict=True)
            return [
                t if is_common else t.movedim(d, 0) if t.dim() else t.reshape(1)
                for t, d, is_common in each
            ]

        def as_they_were(tensors: list[Tensor]) -> list[Tensor]:
            each = zip(tensors, along, tensors_in(outputs[0]), is_common_leaf, strict=True)
            return [
                t if is_common
                else t.movedim(0, d) if like.dim()
                else self.objective.combine([*t], [*self._kept])
                for t, d, like, is_common in each
            ]  # fmt: skip

        output = gather([map_tensors(samples_first, output) for output in outputs], common)
        leaves, structure = flatten(gather(list(targets)), batches=True)
        if any(self._common):
            shared = zip(self._common, flatten(targets[0], batches=True)[0], leaves, strict=True)
            leaves = [first if common else joined for common, first, joined in shared]
        return self._call_loss_fn((map_tensors(as_they_were, output), unflatten(leaves, structure)))

    def _call_loss_fn(self, given: tuple[Any, Any]) -> Any:
        """Calls the loss function once more; puts back its state, also that of its metrics."""
        modules = _modules_of(self.objective.loss_fn.function)
        call = torch.no_grad()(self.objective.call_loss)
        result = with_cpu_generator(
            lambda: restoring_module(nn.ModuleList(modules), lambda: call(given))
        )
        return result[0] if isinstance(result, tuple) else result

    def _agrees(self, found: Tensor, along: list[int]) -> bool:
        """Whether a loss equals the combined one, or is not finite."""
        total, parts = float(found), float(self.objective.loss([*self._kept]))
        rounding = _ROUNDING.get(found.dtype, 2e-2) * abs(total)
        if not math.isfinite(total) or abs(total - parts) <= rounding:  # parts may be nan
            return True
        return self._is_rounding(abs(total - parts), along)

    def _is_rounding(self, difference: float, along: list[int]) -> bool:
        """Whether a difference vanishes in double precision, as rounding of a loss near 0 does."""
        kept = self._kept
        try:
            self._kept = {i: map_tensors(_in_double, given) for i, given in kept.items()}
            losses = list(map(self._call_loss_fn, self._kept.values()))
            parts = self.objective.loss([*kept], losses)
            return abs(float(self._loss_of_all(along)) - float(parts)) <= 1e-3 * difference
        except Exception:  # the device or the loss has no double precision
            return False
        finally:
            self._kept = kept

    def _mismatch_message(self, total: float) -> str:
        reason = (
            "it is no mean over samples. A mean over unmasked targets needs "
            f"{_WEIGHT_HINT}; a sum over samples needs loss_reduction='sum'"
        )
        if self.objective.is_sum:
            reason = "it is no sum over samples. A mean over them needs loss_reduction='mean'"
        parts = float(self.objective.loss([*self._kept]))
        return (
            f"loss_fn returns {total:.6g} for {len(self._kept)} micro-batches at once, but the "
            f"loss combined from each of them is {parts:.6g}, and gradients are wrong likewise: "
            f"{reason}; a loss that compares samples needs all of them, loss_fn(pipe(input), "
            "target). If this is intended: verify=False"
        )


def _modules_of(function: Any) -> list[nn.Module]:
    """The modules whose state a loss function may change: itself, metrics that it has or names."""
    code, values = _parts(function)
    objects = [value for value in values if hasattr(value, "__dict__")]
    children = [value._modules for value in values if isinstance(value, nn.Module)]
    held = [*values, *map(dict, map(vars, objects)), *children]
    named = getattr(function, "__globals__", {})
    held += [named.get(name) for name in getattr(code[0], "co_names", ())]
    found = [value for each in held for value in (each.values() if type(each) is dict else [each])]
    modules = [each for each in found if isinstance(each, nn.Module)]
    return [m for m in modules if m is function or next(m.parameters(), None) is None]


def _unchecked_message(error: Exception) -> str:
    return (
        "loss_fn is not checked, because it fails on several micro-batches at once "
        f"({type(error).__name__}: {error}). It is assumed to be a mean over samples. A mean over "
        f"anything else, for example unmasked targets, needs {_WEIGHT_HINT}. If it is a mean over "
        "samples: verify=False"
    )


def _in_double(tensors: list[Tensor]) -> list[Tensor]:
    return [t.to(torch.float64, copy=True) if t.is_floating_point() else t for t in tensors]
