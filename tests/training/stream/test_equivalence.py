"""``train_stream`` computes what the papers say, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from syncpipe import Pipe, inline
from syncpipe.runtime.worker import Worker
from syncpipe.schedules.stream import VERSIONS
from tests.fuzz.models import dawdling
from tests.support import accelerator as acc
from tests.training.stream.models import (
    BALANCES,
    adam,
    assert_as_in_the_papers,
    mini_batches,
    mlp,
    sgd,
)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("accelerators", marks=pytest.mark.gpu)])
@settings(max_examples=40, deadline=None)
@given(
    replicas=st.integers(1, 4).map(lambda n: [1] * n)
    | st.lists(st.integers(1, 3), min_size=1, max_size=4),
    steps=st.integers(1, 13),
    versions=st.sampled_from(VERSIONS),
    checkpoint=st.sampled_from(["never", "always", "except_last"]),
    optimizer=st.sampled_from([sgd, adam]),
    sizes=st.tuples(st.sampled_from([8, 11]), st.sampled_from([8, 6, 3, 2, 1])),
    flags=st.tuples(*[st.booleans()] * 5),
)
def test_as_in_the_papers(kind, replicas, steps, versions, checkpoint, optimizer, sizes, flags):
    """Whoever is late; of a stage with several replicas each has a mini-batch in turn.

    The last mini-batch may have fewer samples, and so in 2BW fewer micro-batches.
    """
    size, last = sizes
    normed, known, by_hand, from_host, late = flags
    n, copied, device = len(replicas), max(replicas) > 1, torch.device("cpu")
    devices: list[Any] = [f"cpu:{w}" for w in range(sum(replicas))]
    if kind == "accelerators":
        make = Worker if by_hand or len(devices) > acc.count() else torch.device
        devices, device = [make(acc.device(k)) for k in range(len(devices))], acc.device()
    elif by_hand and not copied:
        devices = ["cpu"] * n
    if copied:
        normed, versions = False, "stashing"
    if normed:  # micro-batches of two samples at least, for BatchNorm
        size = last = 8
    model, chunks = mlp(normed).to(device), 4 if versions == "2bw" else 1
    here = [*mini_batches(steps - 1, size), *mini_batches(1, last)]
    data = [(x.to(device), target.to(device)) for x, target in here]
    more = iter([*(here if from_host else data), *data[:1] * known])
    pipe = Pipe(mlp(normed), BALANCES[n], devices=devices, replicas=replicas, chunks=4,
                checkpoint=checkpoint)  # fmt: skip
    for k, layer in enumerate(pipe if late and kind == "cpu" else ()):
        slowly = dawdling(steps + k)
        layer.register_forward_hook(lambda _, given, y, slowly=slowly: slowly(y))
    memory = [p.data_ptr() for p in pipe.parameters()]
    with inline() if by_hand and copied and kind == "cpu" else nullcontext():
        assert_as_in_the_papers(
            pipe, data, more, model=model, optimizer=optimizer, versions=versions, chunks=chunks,
            replicas=replicas, steps=steps if known else None, exact=kind == "cpu",
        )  # fmt: skip
        assert len(list(more)) == known  # no more is taken
        assert [p.data_ptr() for p in pipe.parameters()] == memory
        if not normed:  # replicas have the last weights
            again = pipe.train_batch(*data[0], loss_fn=F.cross_entropy)
            wanted = F.cross_entropy(model(data[0][0]), data[0][1]).detach()
            torch.testing.assert_close(again, wanted, check_device=False)
