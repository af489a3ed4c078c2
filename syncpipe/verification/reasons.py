"""Why two runs differ, as far as that can be told from what is seen of the layers."""

from __future__ import annotations

from collections.abc import Sequence

from syncpipe.compare import Comparison
from syncpipe.state import Change
from syncpipe.verification.observe import Observation

__all__ = ["far", "reason_of_error", "reason_of_layer", "reason_of_loss"]

_RANDOM = (
    "let it draw from PyTorch's own generator (torch.rand_like(x) and the like, no generator=)"
)


def reason_of_layer(seen: Observation, *, by: str) -> str:
    """Why a layer gives something else.

    Args:
        seen: what was seen of it.
        by: what makes the difference: ``"cut"`` of the mini-batch, ``"recomputation"``, or the
            ``"pipe"``.
    """
    kinds = {
        kind: [c.name for c in seen.changes if c.kind == kind and c.name not in _running(seen)]
        for kind in ("generator", "attribute", "parameter", "buffer")
    }
    if by == "cut" and seen.norms:
        deferred = all("Deferred" in norm for norm in seen.norms)
        return (
            f"BatchNorm sees micro-batches ({_few(seen.norms)}): each is normalised by its own "
            "mean and variance. That is what micro-batches mean, and often does no harm; "
            + ("" if deferred else "deferred_batch_norm=True at least for running statistics; ")
            + "LayerNorm and GroupNorm do not look at other samples, nor does BatchNorm in eval()"
        )
    if kinds["generator"]:
        own = _few(kinds["generator"])
        effect = (
            "and that for each micro-batch anew"
            if by == "cut"
            else "of which re-materialization does not know: what is recomputed draws other "
            "numbers, and so does what comes later"
        )
        return f"it draws from a generator of its own ({own}), {effect}; {_RANDOM}"
    if kinds["attribute"]:
        return (
            f"it keeps state ({_few(kinds['attribute'])} changes in forward), which depends on how "
            "often it ran before, and re-materialization runs it once more: register it as a "
            "buffer, or change it only if not syncpipe.is_recomputing()"
        )
    if kinds["parameter"]:
        return f"its forward changes its parameters ({_few(kinds['parameter'])})"
    if kinds["buffer"] and by == "cut":
        return (
            f"it keeps state in buffers ({_few(kinds['buffer'])}) that its output depends on, and "
            "they change with each micro-batch"
        )
    if not seen.repeats:
        return (
            "it does not give the same twice: it depends on something that is not in its module (a "
            "global, a file, the time, a thread), or on memory without a value"
        )
    if seen.writes:
        return (
            "it works in place, on memory that others use as well: let it work on a copy (for an "
            "activation: inplace=False)"
        )
    if by == "cut":
        return (
            "its output for a sample depends on the other samples of the mini-batch: a mean, a "
            "maximum or a softmax over dimension 0, attention between samples, a shape or a number "
            "that it takes from the batch"
        )
    return "not found: by itself it gives the same for the same input"


def _others(seen: Observation) -> list[str]:
    running = _running(seen)
    return [c.name for c in seen.changes if c.kind == "buffer" and c.name not in running]


def _running(seen: Observation) -> list[str]:
    """Running statistics, which change as they should."""
    ends = ("running_mean", "running_var", "num_batches_tracked")
    return [c.name for c in seen.changes if c.name.endswith(ends)]


def reason_of_loss(parts: float, whole: float, m: int, reduction: str, exact: bool) -> str:
    """Why the losses of micro-batches, put together, are not the loss of the mini-batch.

    Args:
        parts: put together.
        whole: of all outputs at once.
        m: number of micro-batches.
        reduction: what the losses were taken for.
        exact: PyTorch's own loss, of which it is known what it does.
    """
    close = 1e-3 * abs(whole)
    if reduction == "mean" and abs(parts * m - whole) <= close:
        return "the loss is a sum over samples, and was taken for a mean: loss_reduction='sum'"
    if reduction == "sum" and abs(parts - whole * m) <= close * m:
        return "the loss is a mean over samples, and was taken for a sum: loss_reduction='mean'"
    if exact:
        return "the outputs of micro-batches are not parts of those of the mini-batch"
    return (
        "the loss is no mean over samples. A mean over what is not masked needs weight=, such as "
        "weight=lambda target: (target != -100).sum(), or (loss, weight) from loss_fn; PyTorch's "
        "own cross entropy needs nothing, if it is given itself and not in a lambda; a loss that "
        "compares samples with each other needs them all: loss_fn(pipe(input), target)"
    )


def reason_of_error(error: str, seen: Sequence[Observation]) -> str:
    """Why a run failed, as far as the layers tell by what they do in plain runs."""
    if "more than 1 value per channel" in error:
        return (
            "BatchNorm needs two samples at least in each micro-batch, and the last one is smaller "
            "than the others: drop_last=True for the loader, or a batch size that chunks divides"
        )
    writers = [str(o.layer) for o in seen if o.writes]
    if "place" in error and writers:
        return f"a layer works in place: {_few(writers)}; let it work on a copy (inplace=False)"
    buffers = [f"{o.layer}: {c.name}" for o in seen for c in o.changes if c.name in _others(o)]
    if "inplace operation" in error and buffers:
        return (
            f"a layer modifies in place what the backward of an earlier micro-batch needs "
            f"({_few(buffers)}): let it use a copy (self.buffer.clone()) for what it computes"
        )
    keeps = [f"{o.layer}: {_few(_names(o.changes))}" for o in seen if _names(o.changes)]
    also = f"; there are layers that keep state ({_few(keeps)})" if keeps else ""
    return f"the message says it{also}"


def _names(changes: list[Change]) -> list[str]:
    return [change.name for change in changes if change.kind in ("attribute", "generator")]


def far(comparison: Comparison) -> str:
    """How different, and what."""
    if comparison.words:
        return f"{comparison.at}: {comparison.words}"
    more = f" and {len(comparison.names) - 1} more" if len(comparison.names) > 1 else ""
    return f"{comparison.at}{more} by up to {comparison.distance:.1e} of its largest value"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
