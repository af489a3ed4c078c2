"""What ``benchmarks.planning`` plans for, profiles drawn from a seed, and how it tells results."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common import Part
from syncpipe.balance.profile import LayerProfile, Profile, SkipProfile
from syncpipe.planner.chain import Mode
from syncpipe.planner.draft import Draft, Form, Terms, one_f_one_b_form
from syncpipe.schedules import gpipe

#: Of a parameter: itself, its gradient and Adam's state.
PARAM_SCALE = 4.0
#: The sizes of micro-batches that random profiles know; between them all is linear.
SIZES = (1, 512)
#: Seconds that a layer takes for no sample at all: launching kernels, Python.
_LAUNCH = 20e-6

_UNDER = "Median (quartiles) over the rounds."


@dataclass
class Table(Part):
    """A part whose numbers are over something else than rounds.

    Attributes:
        over: what stands below its table instead.
    """

    over: str = ""

    def as_markdown(self) -> str:
        """A section of the report."""
        return super().as_markdown().replace(f"\n{_UNDER}\n", f"\n{self.over}\n", 1)


def random_profile(layers: int, seed: str, *, skips: int = 0) -> Profile:
    """A profile with lognormal times and sizes, of the order of a CNN's on a large GPU.

    Of each layer one sample takes 0.05 ms forward (median; sigma 1) besides what the layer takes
    for none, and 1 to 2.5 times as long backward; its output has 0.4 MB, it stores 1 to 2 times
    as much, and it has 2 MB of parameters.

    Args:
        layers: how many.
        seed: the same one gives the same profile.
        skips: how many there are, each from any layer to any later one.
    """
    draw = random.Random(f"{seed}/{layers}")

    def linear(each: float, fixed: float = 0.0) -> dict[int, float]:
        return {size: fixed + each * size for size in SIZES}

    drawn, outputs = [], []
    for index in range(layers):
        forward, output = draw.lognormvariate(math.log(50e-6), 1), draw.lognormvariate(12.9, 1)
        back = draw.uniform(1, 2.5)
        outputs.append(linear(output))
        drawn.append(
            LayerProfile(
                name=str(index),
                forward=linear(forward, _LAUNCH),
                backward=linear(back * forward, back * _LAUNCH),
                output_bytes=outputs[-1],
                stored_bytes=linear(draw.uniform(1, 2) * output),
                parameter_bytes=int(draw.lognormvariate(math.log(2e6), 1)),
            )
        )
    crossing = []
    for index in range(skips):
        stash, pop = sorted(draw.sample(range(layers), 2))
        crossing.append(SkipProfile(f"skip {index}", stash, pop, outputs[stash]))
    return Profile(tuple(drawn), tuple(crossing), input_bytes=linear(6e5))


def given(
    terms: Terms, balance: Sequence[int], m: int, schedule: str, *, overlap: bool = True,
    modes: Sequence[Mode] | None = None,
) -> Draft:  # fmt: skip
    """What any given cut would take under GPipe or 1F1B, whether it fits or not."""
    n, each = len(balance), 2 if overlap else 1
    form = Form(gpipe(m, n))
    if schedule == "1f1b":
        slots = tuple(min(m, each * (n - s) - (each - 1)) for s in range(n))
        form = one_f_one_b_form(m, slots)
    draft = terms.draft(form, balance, modes)
    assert draft is not None
    return draft


def quantiles(ratios: Sequence[float]) -> dict[str, float]:
    """Mean, the 95th of 100, the worst."""
    ordered = sorted(ratios)
    return {
        "mean": math.fsum(ordered) / len(ordered),
        "p95": ordered[math.ceil(0.95 * len(ordered)) - 1],
        "worst": ordered[-1],
    }
