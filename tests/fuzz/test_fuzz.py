"""Random models in random pipes; ``python -m tests.fuzz`` runs thousands by hand."""

from __future__ import annotations

import random
import warnings

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.cases import drawn_case
from tests.fuzz.runs import check


@settings(max_examples=800)
@given(chance=st.randoms(use_true_random=False))
def test_a_random_pipe_computes_what_the_plain_model_computes(chance: random.Random) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of layers that checkpoint what has no gradient
        check(drawn_case(chance))
