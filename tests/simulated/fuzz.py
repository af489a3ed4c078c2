"""Random models in random pipes on accelerators, beside the plain model on the CPU.

    python -m tests.simulated.fuzz --models 2000 --seed 1

A caller writes into what it gave and got as soon as the call is over. The simulated devices tell
where a wait or a ``record_stream`` is missing. Tests run it on real devices, too.
"""

from __future__ import annotations

import random
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from syncpipe.data.trees import map_tensors, tensors_in
from syncpipe.runtime.worker import Worker
from syncpipe.stages import offload
from tests import simulated
from tests.fuzz.cases import Call, Case, drawn_case
from tests.fuzz.command import by_hand
from tests.fuzz.models import KINDS, leaves
from tests.fuzz.runs import Place, expected, results, run_pipe, schedule_of
from tests.support import accelerator as acc
from tests.support.compare import assert_same
from tests.support.models import Result
from tests.support.running import in_threads

__all__ = ["Placed", "check", "drawn"]

WIDE = torch.float64
DEVICES = simulated.DEVICES  #: real ones stand for several where there are fewer
#: The reference is the CPU's, so nothing that draws. Moved to a backend that PyTorch does not know
#: by name, a parameter is another one: its hooks stay behind. Of an LSTM's cell the CPU has no
#: kernel to borrow.
CHOSEN = [
    name
    for name, kind in KINDS.items()
    if not (kind.draws or kind.cpu or kind.lives) and name not in ("parameter_hook", "lstm")
]


@dataclass(frozen=True)
class Placed:
    """A case on the simulated machine.

    Attributes:
        case: the pipe, and what is done with it.
        devices: for each of its workers.
        by_hand: whether workers are made by hand, with compute streams of their own.
        own_streams: whether the caller works on streams of its own.
        host: where targets and iterators' micro-batches come from: ``"pageable"`` or ``"pinned"``
            memory, or a ``"device"``.
        threads: so many do the same at the same time, each with a pipe of its own.
    """

    case: Case
    devices: tuple[str, ...]
    by_hand: bool
    own_streams: bool
    host: str
    threads: int


def drawn(chance: random.Random) -> Placed:
    """Draws a case, and where it runs."""
    case = drawn_case(chance, kinds=CHOSEN, copied=0.2)
    count = max(case.workers) + 1
    by_hand = count > DEVICES or chance.random() < 0.35
    places = [f"{acc.kind()}:{k % acc.count()}" for k in range(DEVICES)]
    if by_hand:  # several workers on one device
        devices = chance.choices(chance.sample(places, 2), k=count)
    else:
        devices = chance.sample(places, count)
    if not case.copied and chance.random() < 0.2:
        devices[chance.randrange(count)] = "cpu"
    if chance.random() < 0.3:
        case = replace(case, checkpoint="offload")
    host, threads = chance.choice(["pageable", "pinned", "device"]), 1 + (chance.random() < 0.2)
    return Placed(case, tuple(devices), by_hand, chance.random() < 0.5, host, threads)


class Caller(Place):
    """A thread that calls a pipe, on streams of its own or not."""

    dtype = WIDE

    def __init__(self, placed: Placed) -> None:
        self.placed = placed
        make = Worker if placed.by_hand else torch.device
        self.pipe = placed.case.pipe(list(map(make, placed.devices)), WIDE)
        self.expected: list[Result] = []

    def run(self) -> None:
        """All calls, each compared with the plain model."""
        with ExitStack() as stack:
            if self.placed.own_streams:
                for k in range(acc.count()):
                    stack.enter_context(torch.Stream(device=acc.device(k)))
            found = results(self.placed.case.calls, self.pipe, self.call)
            for k, pair in enumerate(zip(found, self.expected, strict=True)):
                # To the rounding of float64.
                assert_same(*pair, f"call {k} ", rounded=True, rtol=1e-8, atol=1e-8)
            acc.synchronize()  # before its parameters may go, which it steps on

    def call(self, k: int, call: Call) -> Result:
        return run_pipe(self.pipe, self.placed.case, replace(call, autocast=""), k, self)

    def _given(self, x: Tensor, device: torch.device) -> Tensor:
        """Something for the pipe, where the case has it come from."""
        if self.placed.host == "device":
            return x.to(device)
        return x.pin_memory() if self.placed.host == "pinned" else x

    def input(self, x: Tensor, call: Call) -> Tensor:
        first = self.pipe.devices[0]
        return self._given(x, first) if call.driver == "iterator" else x.to(first)

    def target(self, scale: Tensor, call: Call) -> Tensor:
        return self._given(scale, self.pipe.devices[0 if call.driver == "iterator" else -1])

    def backward(self, loss: Tensor, xs: list[Tensor]) -> None:
        """Once; or twice, while the caller still reads what the first one gave."""
        case = self.placed.case
        nested = {"checkpoint", "reentrant"} & {*case.model.layers}
        twice = not nested and case.checkpoint in ("never", "offload")
        loss.backward(retain_graph=twice)
        if not twice:
            return
        tensors = [t for t in (*leaves(self.pipe).values(), *xs) if t.grad is not None]
        kept = [tensor.grad.clone() for tensor in tensors]
        loss.backward()
        for tensor, grad in zip(tensors, kept, strict=True):
            tensor.grad = grad

    def close(self, given: list[Tensor], made: Any) -> Any:
        """Writes into all that the pipe was given, and what it gave, but for the model's own."""
        own = {leaf.untyped_storage().data_ptr() for leaf in leaves(self.pipe).values()}
        with torch.inference_mode():
            copies = map_tensors(lambda tensors: [t.detach().clone() for t in tensors], made)
            for x in [*given, *tensors_in(made)]:
                if x.device.type != "cpu" and x.untyped_storage().data_ptr() not in own:
                    x.zero_()
        return copies


def check(placed: Placed) -> None:
    """Runs a case.

    Raises:
        AssertionError: something is not as it has to be.
    """
    callers = [Caller(placed) for _ in range(placed.threads)]
    schedules = [schedule_of(callers[0].pipe, call) for call in placed.case.calls]
    wanted = expected(placed.case, schedules, WIDE)
    for caller in callers:
        caller.expected = wanted
    with mock.patch.object(offload, "SMALL", 1):  # so that small models move as well
        if len(callers) == 1:
            callers[0].run()
        else:
            in_threads(Caller.run, *callers)
    assert not (simulated.loaded() and (races := simulated.races())), "\n".join(races)


if __name__ == "__main__":
    simulated.load()
    sys.exit(min(1, by_hand("tests.simulated.fuzz", drawn, check)))
