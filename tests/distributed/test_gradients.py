"""Data-parallel pipes end with the plain model's gradients of all mini-batches at once."""

from __future__ import annotations

import pytest

TINY = 1e-12  # of gradients around 0.1, in double precision

CASES = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "zb_h1": {"schedule": "zb_h1"},
    "interleaved": {"schedule": "interleaved_1f1b", "stages": 4},
    "many buckets": {"bucket_mb": 1e-4, "checkpoint": "always"},
    "uneven": {"sizes": [12, 5, 9], "chunks": [4, 2, 3]},
    "tied": {"kind": "tied"},
    "skip": {"kind": "skip", "schedule": "zb_h1"},
    "replicas": {"kind": "skip", "replicas": [2, 1, 3]},
    "replicas, weights with the loss": {"replicas": 2, "loss": "counted", "schedule": "zb_h1"},
    "frozen": {"kind": "frozen"},
    "unused": {"kind": "sometimes"},
    "unknown loss": {"loss": "weigh", "masked": False, "sizes": [12, 7, 4]},
    "weights with the loss": {"loss": "counted", "sizes": [12, 7, 9]},
    "sums": {"loss": "sum", "sizes": [12, 7, 9]},
    "iterator": {"iterator": True, "sizes": [12, 8, 10], "schedule": "zb_h1"},
    "accumulated": {"no_sync": 2, "sizes": [12, 7, 4]},
    "accumulated, weights with the loss": {"no_sync": 1, "loss": "counted", "sizes": [12, 7, 9]},
    "accumulated sums": {"no_sync": 1, "loss": "sum"},
    "accumulated, unused": {"no_sync": 1, "kind": "sometimes"},
}


@pytest.mark.parametrize("case", CASES)
def test_train_batch(two, case):
    for gradients, loss in two.run("equal:train", CASES[case]):
        assert gradients < TINY
        assert loss < TINY


@pytest.mark.parametrize("case", ["1f1b", "uneven", "unused", "accumulated, weights with the loss"])
def test_train_batch_in_three_processes(three, case):
    for gradients, loss in three.run("equal:train", CASES[case]):
        assert gradients < TINY
        assert loss < TINY


def test_a_loss_has_parameters_of_its_own_and_one_of_another_stage(two):
    for found in two.run("equal:loss_with_parameters"):
        assert max(found) < TINY


def test_what_goes_on_into_the_graph_of_the_caller(three):
    assert max(three.run("equal:before_the_pipe")) < TINY


def test_grad_scaler_and_autocast(two):
    assert max(two.run("equal:grad_scaler")) < 1e-3
