"""Random models in random pipes; ``python -m tests.fuzz`` runs thousands by hand."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import lives
from tests.fuzz.cases import Call, Case, drawn_case
from tests.fuzz.models import Model
from tests.fuzz.runs import check


@settings(max_examples=200)
@given(chance=st.randoms(use_true_random=False))
def test_a_random_pipe_computes_what_the_plain_model_computes(chance: random.Random) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of layers that checkpoint what has no gradient
        check(drawn_case(chance))


@pytest.mark.parametrize(
    ("layers", "checkpoint", "driver"),
    [
        # A hook that draws, on an activation in a tree.
        (("fork", "noisy_hook", "join"), "always", "forward"),
        # It hands on a parameter, which has no node in inference mode.
        (("weighs",), "never", "inference_mode"),
        # It draws, and is given a parameter: the second time that is a tensor.
        (("weighs", "dropout"), (0, 1), "train"),
        # A backward inside of a layer recomputes a pipe that gives up the generators.
        (("slope_dropout", "pipe_dropout"), ((0, 1),), "train"),
        # It does so in the middle of the forward, which changes buffers once all the same.
        (("slope", "batch_norm"), ((0, 1),), "train"),
        (("slope", "counter"), ((0, 1),), "train"),
        (("linear", "mul_", "slope"), (0, (1, 2)), "train"),
        (("no_trace", "counter", "slope", "spectral_norm", "dropout"), ((0, 1, 2, 3, 4),), "train"),
    ],
)
def test_models_that_failed_once(layers: tuple[str, ...], checkpoint: Any, driver: str) -> None:
    call = Call(driver, "1f1b", "mean", (4,), "", True, False, True)
    model, whole = Model(layers, 0), (len(layers),)
    check(Case(model, whole, (0,), (1,), 2, checkpoint, False, True, (call, call)))


def test_lives() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(50):
            story = lives.drawn_story(random.Random(f"suite/{seed}"))
            try:
                lives.check(story)
            except Exception as error:
                raise AssertionError(f"a life fails:\n{lives.shrunk(story)}") from error


def test_a_life_that_fails_is_printed_as_a_short_program() -> None:
    def check(story: lives.Story) -> None:
        names = [name for name, *_ in story.events]
        assert names.count("call") < 2 or "gelu" not in story.layers

    def fails(story: lives.Story) -> bool:
        return [name for name, *_ in story.events].count("call") > 1 and "gelu" in story.layers

    stories = (lives.drawn_story(random.Random(seed)) for seed in range(1000))
    program = str(lives.shrunk(next(filter(fails, stories)), check)).splitlines()
    assert len(program) == 3
    exec("\n".join(program), {"Life": lives.Life})


TWO = "balance=(1, 1), devices=(0, 1), chunks=2"
THREE = "balance=(1, 2), devices=(0, 1), chunks=4"


@pytest.mark.parametrize(
    ("layers", "rest"),
    [
        # What a layer hands on is what it keeps.
        (f"'center', 'linear', 'centered', {THREE}", "call('outputs'); call('train')"),
        (f"'send_kept', 'linear', 'receive', {THREE}", "call('train')"),
        # A recomputation sees another count, or what a later forward left.
        (f"'counted', 'linear', {TWO}, checkpoint='always'", "call('train')"),
        (f"'remembered', 'linear', 'linear', {THREE}, checkpoint='always'", "call('train')"),
        # Statistics that begin to move in a later call.
        (
            f"'observed', 'linear', {TWO}, checkpoint='always'",
            "call('train'); change(0, 2); call('train')",
        ),
        # A large buffer is not copied.
        (f"'linear', 'table', {TWO}, checkpoint='always'", "end()"),
        # What is made, or looked at, where other tensors stand for parameters.
        (
            "'parameter_hook', 'makes_module', balance=(2,), devices=(0,), chunks=2",
            "call('forward')",
        ),
        (
            f"'linear', 'makes', 'linear', {THREE}, ties=((0, 2, False),)",
            "call('train'); call('train')",
        ),
        (f"'linear', 'looks', {TWO}", "hook(1, 'parameter'); call('forward')"),
        (f"'linear', 'pipe', {TWO}", "hook(1, 'parameter'); call('forward')"),
        # What was seen in one call holds for that call.
        (f"'linear', 'sometimes', {TWO}", "change(1, 2); call('train'); change(1, 0.5); end()"),
        (f"'linear', 'factor', {TWO}", "call('train', under='tracer'); end()"),
        # An evaluation in another thread.
        (f"'linear', 'batch_norm', {TWO}", "call('forward', under='evaluation')"),
        # Layers that are replaced.
        (
            f"'linear', 'linear', {TWO}",
            "replace(1, 'linear', 'name'); set('devices', (1, 0)); call('train')",
        ),
        (f"'linear', 'linear', {TWO}", "replace(1, 'linear', 'partition'); call('train'); step()"),
        (
            f"'linear', 'linear', {TWO}",
            "replace(1, 'linear', 'of partition'); call('train'); step()",
        ),
    ],
)
def test_lives_that_failed_once(layers: str, rest: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        life = eval(f"Life({layers})", {"Life": lives.Life})
        for event in rest.split("; "):
            eval(f"life.{event}", {"life": life})
