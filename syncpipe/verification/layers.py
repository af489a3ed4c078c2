"""What each layer does by itself, and which of five reasons it can be for a difference.

A layer looks at other samples, draws from a generator of its own, keeps state, works in place; or
the loss is no mean over samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncpipe.compare import Comparison, compare
from syncpipe.data import clones, flatten, leaf_names, map_tensors, tensors_in, unflatten
from syncpipe.skip.store import Store
from syncpipe.state import Change, State
from syncpipe.verification.runs import Layer, PlainRun, Runs, named

__all__ = ["Observation", "observe"]

_RUNNING = ("running_mean", "running_var", "num_batches_tracked")  # these change as they should


@dataclass
class Observation:
    """What is seen of a layer that runs plainly, on the mini-batch and on its micro-batches.

    Attributes:
        layer: the layer.
        comparison: of its outputs for the micro-batches with that for the mini-batch.
        repeats: it gives the same twice for the same input and random numbers.
        draws: it draws random numbers as PyTorch's layers do, so that these have to differ.
        writes: it modifies its input in place.
        changed: by kind, what its forwards changed in it.
        norms: batch normalisations in it that go by the batch at hand.
    """

    layer: Layer
    comparison: Comparison
    repeats: bool
    draws: bool
    writes: bool
    changed: dict[str, list[str]] = field(default_factory=dict)
    norms: list[str] = field(default_factory=list)

    @property
    def suspicious(self) -> bool:
        """Whether a pipe can make it give something else."""
        return self.writes or (not self.repeats and "buffer" not in self.changed)

    def reason(self, *, cut: bool) -> str:
        """Why it gives something else.

        Args:
            cut: for micro-batches; otherwise in the pipe.
        """
        if cut and self.norms:
            deferred = all("Deferred" in norm for norm in self.norms)
            return (
                f"BatchNorm sees micro-batches ({_few(self.norms)}): each is normalised by its own "
                "mean and variance. That is what micro-batches mean, and often does no harm; "
                + ("" if deferred else "deferred_batch_norm=True at least for running statistics; ")
                + "LayerNorm and GroupNorm do not look at other samples, nor does BatchNorm in "
                "eval()"
            )
        kinds = {kind: _few(names) for kind, names in self.changed.items()}
        if own := kinds.get("generator"):
            return (
                f"it draws from a generator of its own ({own}): for each micro-batch anew, "
                "and again when it is recomputed; let it draw from PyTorch's own generator "
                "(torch.rand_like(x) and the like, no generator=)"
            )
        if not self.repeats and (state := kinds.get("attribute")):
            return (
                f"it keeps state ({state} changes in forward), which depends on how often it "
                "ran before, and recomputation runs it once more: register it as a buffer, or "
                "change it only if not syncpipe.is_recomputing()"
            )
        if not self.repeats and kinds:
            return (
                f"it keeps state in parameters or buffers ({', '.join(kinds.values())}) that its "
                "output depends on, and they change with each micro-batch"
            )
        if not self.repeats:
            return (
                "it does not give the same twice: it depends on something that is not in its "
                "module (a global, a file, the time, a thread), or on memory without a value"
            )
        if self.writes:
            return (
                "it works in place, on memory that others use as well: let it work on a copy (for "
                "an activation: inplace=False)"
            )
        if cut:
            return (
                "its output for a sample depends on the other samples of the mini-batch: a mean, a "
                "maximum or a softmax over dimension 0, attention between samples, a shape or a "
                "number that it takes from the batch"
            )
        return "not found: by itself it gives the same for the same input"


@torch.no_grad()
def observe(runs: Runs, seen: list[Observation]) -> tuple[Any, Exception | None]:
    """Runs each layer on the mini-batch, and on the micro-batches that it consists of.

    A layer after one that draws or differs gets the joined micro-batches as its mini-batch, so each
    is seen by itself.

    Args:
        runs: whose layers they are.
        seen: gets an observation for each layer.

    Returns:
        The output for the mini-batch, and what a layer raised on a micro-batch.
    """
    failed: Exception | None = None
    run, other = PlainRun(runs.pipeline), PlainRun(runs.pipeline)
    cut, uncut = runs.source(runs.pipe.chunks), runs.source(1)
    pieces, whole = [cut.pull(i) for i in range(cut.m)], uncut.pull(0)
    stores: list[Store] = [{} for _ in pieces]
    store: Store = {}
    for k, layer in enumerate(runs.layers):
        if k == 0 or layer.stage is not runs.layers[k - 1].stage:
            whole = other.enter(layer, whole, store)
            pieces = (
                pieces
                if failed
                else [run.enter(layer, *each) for each in zip(pieces, stores, strict=True)]
            )
        state = State({"": layer.module}, leave=[runs.pipe])
        once = partial(_on_copies, other, layer, whole, store)
        again, (whole, store) = state.restored(partial(_twice, once), [layer.device])
        if failed is not None:
            continue
        entering = tensors_in(pieces[0])
        versions = [tensor._version for tensor in entering]
        try:
            pieces = [run.layer(layer, i, piece, stores[i]) for i, piece in enumerate(pieces)]
        except Exception as error:
            failed = error
            continue
        joined, comparison = _joined(whole, pieces)
        found = Observation(
            layer,
            comparison,
            repeats=compare(named("", again), named("", whole)).same,
            draws=layer.index in run.drew,
            writes=[tensor._version for tensor in entering] != versions,
            changed=_by_kind(state.changes()),
            norms=_norms(layer.module),
        )
        seen.append(found)
        if found.draws or not comparison.same:
            whole = joined
    return whole, failed


def _twice(run: Any) -> Any:
    return run()[0], run()


def _on_copies(run: PlainRun, layer: Layer, value: Any, store: Store) -> tuple[Any, Store]:
    """The output of a layer, and the skips after it; for copies, into which it may write."""
    value, skips = map_tensors(clones, (value, list(store.values())))
    store = dict(zip(store, skips, strict=True))
    return run.layer(layer, 0, value, store), store


def _joined(whole: Any, pieces: list[Any]) -> tuple[Any, Comparison]:
    """Outputs of micro-batches as one of the mini-batch, and how they compare."""
    leaves, structure = flatten(whole)
    rows = [flatten(piece)[0] for piece in pieces]
    if any(len(row) != len(leaves) for row in rows):
        return whole, Comparison("different", words="trees of other structures")
    expected, actual = {}, {}
    for k, name in enumerate(leaf_names("output", whole)):
        parts, leaf = [row[k] for row in rows], leaves[k]
        tensors = all(isinstance(part, Tensor) for part in [*parts, leaf])
        if tensors and leaf.dim() == 0:
            continue  # a mean over samples, say, which is in the loss
        if tensors and all(p.dim() for p in parts) and sum(map(len, parts)) == len(leaf):
            leaves[k] = torch.cat(parts)
            expected[name], actual[name] = leaf, leaves[k]
        else:
            for i, part in enumerate(parts):
                expected[f"{name} for micro-batch {i}"] = leaf
                actual[f"{name} for micro-batch {i}"] = part
    return unflatten(leaves, structure), compare(actual, expected)


def _by_kind(changes: list[Change]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for change in changes:
        if not change.name.endswith((*_RUNNING, "_hooks")):
            found.setdefault(change.kind, []).append(change.name)
    return found


def _norms(module: nn.Module) -> list[str]:
    return [
        f"{name!r}: {type(part).__name__}" if name else type(part).__name__
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
    ]


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
