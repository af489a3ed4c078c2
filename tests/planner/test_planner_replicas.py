"""PipeDream's planner against every configuration there is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncpipe.balance.profile import LayerProfile, Profile, SkipProfile
from syncpipe.planner.replicas import replicated

Stages = tuple[tuple[int, int, int], ...]


def profile(
    times: list[float],
    outputs: list[float],
    weights: list[int],
    skips: tuple[SkipProfile, ...] = (),
    frozen: int = 0,
) -> Profile:
    """Layers of so many seconds (a third of it forward), bytes out and bytes of parameters."""
    return Profile(
        tuple(
            LayerProfile(
                f"layer{k}", {1: t / 3}, {1: t * 2 / 3}, {1: a}, {1: 0}, {}, w, min(w, frozen)
            )
            for k, (t, a, w) in enumerate(zip(times, outputs, weights, strict=True))
        ),
        skips,
    )


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True))


def every(layers: int, machines: int) -> Iterator[Stages]:
    for n in range(1, min(layers, machines) + 1):
        for sizes in compositions(layers, n):
            for copies in compositions(machines, n):
                starts = [sum(sizes[:j]) for j in range(n)]
                yield tuple(
                    (start, start + size, m)
                    for start, size, m in zip(starts, sizes, copies, strict=True)
                )


def time_of(stages: Stages, profile: Profile, bandwidth: float) -> float:
    """The formula, written down once more."""
    worst = 0.0
    for first, last, m in stages:
        layers = profile.layers[first:last]
        computing = sum(layer.forward[1] + layer.backward[1] for layer in layers)
        exchange = 4 * (m - 1) * sum(layer.parameter_bytes for layer in layers) / (m * bandwidth)
        worst = max(worst, computing / m, exchange / m)
        if first:
            worst = max(worst, 2 * profile.layers[first - 1].output_bytes[1] / (bandwidth * m))
    return worst


numbers = st.integers(0, 20)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    layers = draw(st.integers(1, 6))
    row = st.lists(numbers, min_size=layers, max_size=layers)
    return profile(draw(row), draw(row), draw(row))


@given(profiles(), st.integers(1, 5), st.sampled_from([0.5, 1.0, 3.0, 10.0, math.inf]))
def test_nothing_is_faster(profile: Profile, machines: int, bandwidth: float) -> None:
    found = replicated(profile, machines, bandwidth)
    best = min(
        time_of(stages, profile, bandwidth) for stages in every(len(profile.layers), machines)
    )
    assert found.time == pytest.approx(best)
    assert found.times[-1] == pytest.approx(best)


@given(profiles(), st.integers(1, 5), st.sampled_from([0.5, 1.0, 3.0]))
def test_of_the_fastest_it_has_the_fewest_stages(
    profile: Profile, machines: int, bandwidth: float
) -> None:
    found = replicated(profile, machines, bandwidth)
    for stages in every(len(profile.layers), machines):
        if len(stages) < len(found.stages):
            assert time_of(stages, profile, bandwidth) > found.time * (1 + 1e-12)


@given(profiles(), st.integers(1, 5), st.sampled_from([0.5, 1.0, 3.0]))
def test_then_the_fewest_bytes(profile: Profile, machines: int, bandwidth: float) -> None:
    def sent(stages: Stages) -> float:
        return sum(profile.layers[first - 1].output_bytes[1] for first, _, _ in stages[1:])

    found = replicated(profile, machines, bandwidth)
    for stages in every(len(profile.layers), machines):
        if len(stages) == len(found.stages) and sent(stages) < sent(found.stages):
            assert time_of(stages, profile, bandwidth) > found.time * (1 + 1e-12)


@given(profiles(), st.integers(1, 8))
def test_the_stages_are_all_layers_on_all_machines(profile: Profile, machines: int) -> None:
    found = replicated(profile, machines, 2.0)
    assert [first for first, _, _ in found.stages[1:]] == [last for _, last, _ in found.stages[:-1]]
    assert found.stages[0][0] == 0
    assert found.stages[-1][1] == len(profile.layers)
    assert found.machines == machines
    assert all(first < last and m >= 1 for first, last, m in found.stages)


@given(profiles(), st.integers(1, 5))
def test_what_it_says_of_itself_is_the_formula(profile: Profile, machines: int) -> None:
    found = replicated(profile, machines, 2.0)
    L = len(profile.layers)
    assert found.time == pytest.approx(time_of(found.stages, profile, 2.0))
    assert found.data_parallel == pytest.approx(time_of(((0, L, machines),), profile, 2.0))
    assert found.one_machine == pytest.approx(time_of(((0, L, 1),), profile, 2.0))
    assert found.data_parallel >= found.time


def vgg_like() -> Profile:
    """Work in front, parameters at the end, and little on the way between the two."""
    return profile([40, 40, 10], [100, 1, 1], [1, 1, 400])


def test_the_parameters_stay_on_one_machine() -> None:
    found = replicated(vgg_like(), 4, 10.0)
    assert found.configuration == "3-1"
    assert found.stages == ((0, 2, 3), (2, 3, 1))
    assert found.synchronization[1] == 0
    assert found.speedup == pytest.approx(found.data_parallel / (80 / 3))


def test_two_cuts() -> None:
    found = replicated(profile([20, 10, 10], [1, 1, 1], [1, 200, 200]), 4, 10.0)
    assert found.configuration == "2-1-1"


def test_data_parallelism_where_gradients_take_no_time() -> None:
    found = replicated(vgg_like(), 8, math.inf)
    assert found.configuration == "8"
    assert found.speedup == 1
    assert found.time == pytest.approx(90 / 8)


def test_one_machine() -> None:
    found = replicated(vgg_like(), 1, 1.0)
    assert found.configuration == "1"
    assert found.time == pytest.approx(found.one_machine)


def test_frozen_parameters_need_no_exchange() -> None:
    found = replicated(profile([8], [1], [100], frozen=100), 2, 1.0)
    assert found.synchronization == (0,)


def test_a_skip_counts_where_it_crosses_a_cut() -> None:
    skip = SkipProfile("s", 0, 1, {1: 400})
    plain, skipped = (
        replicated(profile([10, 10], [1, 1], [100, 100], skips), 2, 10.0) for skips in ((), (skip,))
    )
    assert plain.configuration == "1-1"
    assert skipped.configuration == "2"


def test_a_mini_batch_of_another_size() -> None:
    layers = [LayerProfile("a", {2: 1, 4: 2}, {2: 2, 4: 4}, {2: 1, 4: 2}, {2: 0, 4: 0})]
    assert replicated(Profile(tuple(layers)), 1, 1.0).time == pytest.approx(6)
    assert replicated(Profile(tuple(layers)), 1, 1.0, samples=3).time == pytest.approx(4.5)


def test_a_profile_of_nobody_knows_how_many() -> None:
    entry = {"name": "a", "forward_ms": 1, "backward_ms": 2, "activation_bytes": 1}
    whole = Profile.from_list([{**entry, "parameter_bytes": 1, "stored_bytes": 1}])
    found = replicated(whole, 1, 1.0)
    assert found.samples is None
    assert found.time == pytest.approx(0.003)
    assert replicated(whole, 1, 1.0, samples=32).time == pytest.approx(0.003)


def test_nothing_takes_no_time() -> None:
    found = replicated(profile([0, 0], [0, 0], [0, 0]), 3, 1.0)
    assert (found.time, found.speedup) == (0, 1)
    str(found)


# --- the page -----------------------------------------------------------------------------------


def test_the_page_explains_the_stages() -> None:
    text = str(replicated(vgg_like(), 4, 10.0))
    assert "configuration 3-1" in text
    assert "layer0 to layer1 (2)" in text
    assert "computing in stage 0" in text
    assert "stage 0, on 3 of the 4 machines, has 89 % of the work" in text
    assert "exchanges its 0 % of them" in text


def test_the_page_says_that_nothing_is_exchanged() -> None:
    text = str(replicated(profile([1, 1], [1, 1], [100, 100]), 2, 2.0))
    assert "each stage is on one machine, and none are exchanged" in text


def test_the_page_says_data_parallelism() -> None:
    text = str(replicated(vgg_like(), 8, 1e9))
    assert "data parallelism, all layers on each of them" in text
    assert "no stages, because exchanging all gradients takes no longer than computing" in text


def test_the_page_says_why_stages_do_not_help() -> None:
    text = str(replicated(profile([1, 1], [1000, 1], [10, 10]), 2, 1.0))
    assert "no stages, because at every cut" in text
    assert "1 machine alone would be faster" in text


def test_the_page_says_where_the_time_goes() -> None:
    assert replicated(profile([1, 1], [1, 1], [10, 10]), 2, 2.0).bottleneck in (
        "computing in stage 0",
        "computing in stage 1",
    )
    slow = replicated(profile([1, 1], [9, 1], [100, 100]), 2, 2.0)
    assert slow.bottleneck == "transfers to stage 1"
    alone = replicated(profile([1], [1], [100]), 2, 2.0)
    assert alone.bottleneck == "exchanging gradients between the replicas of stage 0"


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machines", "bandwidth", "samples", "match"),
    [
        (0, 1.0, None, "machines=0"),
        (2, 0.0, None, r"bandwidth=0\.0"),
        (2, math.nan, None, "bandwidth=nan"),
        (2, 1.0, 0, "samples=0"),
    ],
)
def test_numbers_that_are_none(
    machines: int, bandwidth: float, samples: int | None, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        replicated(vgg_like(), machines, bandwidth, samples=samples)
