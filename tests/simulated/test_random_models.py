"""Random models in random pipes; ``python -m tests.simulated.fuzz`` runs thousands by hand."""

from __future__ import annotations

import random
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulated.fuzz import check, drawn

pytestmark = pytest.mark.gpu


@settings(max_examples=80)
@given(chance=st.randoms(use_true_random=False))
def test_a_random_pipe_computes_what_the_plain_model_computes_on_the_cpu(
    chance: random.Random,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of layers that checkpoint what has no gradient
        check(drawn(chance))
