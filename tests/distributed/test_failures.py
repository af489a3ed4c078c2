"""What goes wrong in one process ends the call in all, with the reason."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from syncpipe import Pipe
from syncpipe.distributed import data_parallel, peers
from tests.distributed.processes import ranks, told
from tests.distributed.test_gradients import batches, mine, pipe_of, whole
from tests.support.running import on_gradient, raising

GUILTY = 1
TWO = ["cpu:0", "cpu:1"]
ENDED = "RuntimeError: this data-parallel pipe has ended: "


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _interrupted(x: Tensor) -> None:
    interrupt()
    threading.Event().wait(0.2)


#: What a stage does in its third forward.
HOOKS: dict[str, Callable[[Tensor], Any]] = {
    # With words by which the loss of a connection is known.
    "forward": raising(lambda: RuntimeError("a closed file of my peer")),
    "backward": lambda x: on_gradient(x, raising(lambda: ArithmeticError("no way back"))),
    "interrupt": _interrupted,
}


def second(how: str, stage: int = 0, before: bool = False) -> tuple[str, bool, str] | None:
    """The second call, which is another one in process 1, or which that does not make.

    Args:
        how: it is another one.
        stage: where.
        before: whether there are gradients.

    Returns:
        What it raises, whether gradients are what they were, and what the next call says.
    """
    peers.PATIENCE, peers._POLL = 0.3, 0.1
    rank, size = distributed.get_rank(), distributed.get_world_size()
    odd = rank == GUILTY
    pipe, plain = pipe_of()
    pairs = batches([8] * size, 1, masked=True)
    x, target = pairs[rank]
    pipe.train_batch(x, target, loss_fn=F.cross_entropy)  # the next one may start sums early
    if before:
        F.cross_entropy(plain(whole(pairs)[0]), whole(pairs)[1]).backward()
    else:
        pipe.zero_grad()
    if "comes" in how:
        pipe._averaging.peers._timeout = 3.0
    if odd and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if odd and how == "raises":
        raise SystemExit from OSError("the disk is full")
    if odd and "comes" in how:
        _kept.append(pipe)  # one that is gone says so
        return None
    given: dict[str, Any] = {"input": x, "target": target}
    if how in ("iterator", "loss"):
        k = 2 if odd and how == "iterator" else 4
        given = {"data_iter": zip(x.chunk(k), target.chunk(k), strict=True)}
    losses: list[int] = []
    extra = nn.Parameter(torch.ones((), dtype=torch.float64))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        losses.append(0)  # at the second one all know what the mini-batch is assumed to weigh
        if odd and how == "loss" and len(losses) == 2:
            raise ArithmeticError("no loss")
        return F.cross_entropy(output, target) * (extra if odd and how == "found" else 1)

    call: Any = partial(pipe.train_batch, loss_fn=loss_fn, verify=False)
    if how in ("accumulate", "evaluates", "gradients"):  # whose weights are known before
        call = partial(pipe.train_batch, loss_fn=F.cross_entropy)
    if how == "nobody comes to eval_batch" or (odd and how == "evaluates"):
        call = partial(pipe.eval_batch, loss_fn=F.cross_entropy, global_loss=True)
    if odd and how == "accumulate":
        given["accumulate"] = 2
    if odd and how == "gradients":
        pipe[2].weight.requires_grad_(False)
    if odd and how == "target":
        given["target"] = target[1:]
    if odd and how in HOOKS:
        calls: list[int] = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> Any:
            calls.append(0)
            return HOOKS[how](output) if len(calls) == 3 or how == "backward" else None

        pipe.partitions[stage].register_forward_hook(hook)
    first = told(lambda: call(**given))
    same = all(
        p.grad is q.grad if q.grad is None else (p.grad - q.grad).abs().max() < 1e-12
        for p, q in zip(pipe.parameters(), plain.parameters(), strict=True)
    )
    return first, same, told(lambda: pipe.train_batch(x, target, loss_fn=F.cross_entropy))


_kept: list[Pipe] = []


def closes() -> None:
    """Who waits for process 1 is woken, although process 0 has closed its connections before."""
    rank = distributed.get_rank()
    here = peers.Peers(peers.given_group(None, "group"), "pipe", "process")
    group, store = here.groups[0], distributed.distributed_c10d._get_default_store()
    keys = [f"{group.group_name}/{what}" for what in ("closed", "done")]
    limit = timedelta(seconds=30)
    distributed.barrier()  # all have their connections
    if rank == 0:
        here.close()
        store.set(keys[0], "")
    elif rank == 2:
        works = [distributed.irecv(torch.empty(1), None, group, group_src=k) for k in (0, 1)]
        store.wait([keys[0]])
        told(lambda: works[0].wait(limit))
        here.close()
        said = told(lambda: works[1].wait(limit))
        store.set(keys[1], "")
        assert "30000ms" not in said
    store.wait([keys[1]])


def test_closing_wakes_whoever_waits(three):
    three.run(closes)


FAILS = {
    "forward": "RuntimeError: a closed file of my peer",
    "backward": "ArithmeticError: no way back",
    "interrupt": "KeyboardInterrupt",
    "iterator": "ValueError: data_iter ended when asked for micro-batch 2",
    "loss": "ArithmeticError: no loss",
    "target": "ValueError: ",
}


@pytest.mark.parametrize(
    ("how", "stage", "before"),
    [
        ("forward", 0, False), ("backward", 0, True), ("backward", 2, False),
        ("interrupt", 1, True), ("iterator", 0, True), ("loss", 2, False), ("target", 0, True),
    ],
)  # fmt: skip
def test_an_exception_in_one_process(two, three, how, stage, before):
    processes = three if (how, stage) == ("backward", 0) else two
    for rank, (first, same, then) in enumerate(processes.run(second, how, stage, before)):
        there = "" if rank == GUILTY else "RemoteError: process 1 failed with "
        assert first.startswith(there + FAILS[how])
        assert same
        assert then.startswith(ENDED)


GONE = {
    "nobody comes": "process 1 did not begin call 2 of a data-parallel pipe within 3 s",
    "nobody comes to eval_batch": "process 1 did not begin call 2 of a data-parallel pipe within",
    "killed": "process 1 no longer responds, and was probably killed",
    "raises": "process 1 has ended with OSError: the disk is full",
}


@pytest.mark.parametrize("how", GONE)
def test_a_process_that_does_not_come(three, tmp_path, how):
    if "comes" in how:
        found = three.run(second, how)
    else:
        with ranks(3, tmp_path) as processes:
            found = processes.run(second, how, gone=[GUILTY])
    assert found[GUILTY] is None
    for first, same, then in (found[0], found[2]):
        assert first.startswith("LostProcess: ")
        assert GONE[how] in first
        assert same
        assert then.startswith(ENDED)


def interrupted(where: str) -> tuple[str, bool]:
    """Ctrl-C in process 0 while process 1 is late: it has not begun, or does not add gradients."""
    pipe, _ = pipe_of()
    pipe.train_batch(*mine(), loss_fn=F.cross_entropy)  # so sums are started by the caller
    before = [p.grad.clone() for p in pipe.parameters()]
    store = distributed.distributed_c10d._get_default_store()
    key = f"interrupted/{pipe._averaging.groups[0].group_name}"
    late = distributed.get_rank() == GUILTY
    all_reduce = distributed.all_reduce
    timer = threading.Timer(1.0, interrupt)

    def patched(*args: Any, **options: Any) -> Any:
        if late:
            store.wait([key])
        elif not timer.is_alive():
            timer.start()
        return all_reduce(*args, **options)

    def call() -> None:
        if where == "begin" and not late:
            timer.start()
        pipe.train_batch(*mine(), loss_fn=F.cross_entropy)

    if where == "sums":
        distributed.all_reduce = patched
    elif late:
        store.wait([key])
    try:
        first = told(call)
    finally:
        distributed.all_reduce = all_reduce
    store.set(key, "")
    return first, all(map(torch.equal, [p.grad for p in pipe.parameters()], before))


@pytest.mark.parametrize("where", ["begin", "sums"])
def test_ctrl_c_while_another_process_is_late(two, where):
    (first, same), (then, same_there) = two.run(interrupted, where)
    assert first.startswith("KeyboardInterrupt")
    assert then.startswith("RemoteError: process 0 failed with KeyboardInterrupt")
    assert same
    assert same_there


def all_refuse() -> list[str]:
    pipe, _ = pipe_of()
    x, target = mine()
    calls = [target, target[1:], target]
    return [told(lambda t=t: pipe.train_batch(x, t, loss_fn=F.cross_entropy)) for t in calls]


def test_a_call_that_all_processes_refuse_ends_nothing(two):
    for first, second_call, third in two.run(all_refuse):
        assert second_call.startswith("ValueError: the input and the target")
        assert first == third == "nothing"


def refused(how: str) -> tuple[str, bool, str]:
    """What models, arguments and calls are refused by ``data_parallel``, in a process of its own.

    All but ``sparse`` and ``nested`` are the odd process's only.
    """
    odd = distributed.get_rank() == GUILTY
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    x = torch.randn(8, 6)
    changed = {
        "shape": (2, nn.Linear(6, 4)), "number": (2, nn.Linear(6, 3, bias=False)),
        "lazy": (1, nn.LazyLinear(6)), "sync": (1, nn.SyncBatchNorm(6)),
    }  # fmt: skip
    if odd and how in changed:
        layers[changed[how][0]] = changed[how][1]
    if odd and how == "frozen":
        layers[1].weight.requires_grad_(False)
    if odd and how == "buffer":
        layers[1].register_buffer("count", torch.zeros(2))
    if how == "sparse":
        layers.insert(0, nn.Embedding(5, 6, sparse=True))
        x = torch.randint(0, 5, (8,))
    balance = [1, len(layers) - 1] if odd and how == "balance" else [2, len(layers) - 2]
    pipe = Pipe(layers, balance, devices=TWO, chunks=2)
    bucket_mb = 26 if odd and how == "bucket_mb" else 25

    def loss(y: Tensor) -> Tensor:
        if how == "nested":
            pipe.train_batch(x, loss_fn=torch.mean)
        return y.mean()

    def call() -> None:
        data_parallel(pipe, bucket_mb=bucket_mb).train_batch(x, loss_fn=loss)

    return told(call), True, ENDED


#: Of both processes, or of process 1 alone, which the other one then names.
REFUSALS = {
    (second, "accumulate"): "accumulate: process 0 has 1, process 1 has 2",
    (second, "evaluates"): "the call: process 0 has train_batch, process 1 has eval_batch",
    (second, "gradients"): "of stage 1 (0: frozen): process 0 has [288, 48], process 1 has [0, 48]",
    (second, "found"): "of what is no parameter of the pipe (0: frozen): process 0 has [], process",
    (refused, "shape"): "'2.weight': process 0 has float32[3, 6], trained, process 1 has float32[4",
    (refused, "number"): "'2.bias': process 0 has float32[3], trained, process 1 has no such thing",
    (refused, "frozen"): "'1.weight': process 0 has float32[6, 6], trained, process 1 has",
    (refused, "balance"): "balance: process 0 has [2, 1], process 1 has [1, 2]",
    (refused, "buffer"): "buffer '1.count': process 0 has no such thing, process 1 has float32[2]",
    (refused, "bucket_mb"): "bucket_mb: process 0 has 25, process 1 has 26",
    (refused, "lazy"): "RuntimeError: Can't access the shape of an uninitialized parameter",
    (refused, "sync"): "TypeError: layer '1' is a SyncBatchNorm",
    (refused, "sparse"): "TypeError: a parameter of shape [5, 6] has a sparse gradient",
    (refused, "nested"): "RuntimeError: a data-parallel pipe is called inside of a call of a pipe",
}


@pytest.mark.parametrize(("act", "how"), REFUSALS)
def test_what_is_refused(two, act, how):
    for rank, (found, _, then) in enumerate(two.run(act, how)):
        assert REFUSALS[act, how] in found
        if how in ("lazy", "sync") and rank != GUILTY:
            assert "process 1 of the data-parallel pipe refused, so all do: " in found
        assert then.startswith(ENDED)
