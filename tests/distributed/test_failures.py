"""What goes wrong in one process ends the call in all, with the reason; and the next one works."""

from __future__ import annotations

import pytest

from tests.distributed.processes import ranks

REASONS = {
    "forward": "ArithmeticError: no way on",
    "backward": "ArithmeticError: no way back",
    "interrupt": "KeyboardInterrupt",
    "iterator": "ValueError: data_iter ended when asked for micro-batch 2",
    "loss": "ArithmeticError: no loss",
}
ENDED = "RuntimeError: this data-parallel pipe has ended: "


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("how", "stage"),
    [
        ("forward", 0),
        ("backward", 0),
        ("backward", 2),
        ("interrupt", 1),
        ("iterator", 0),
        ("loss", 2),
    ],
)
def test_an_exception_in_one_process(two, how, stage, before):
    (theirs, *after), (guilty, *its_after) = two.run("failing:fails", how, stage, before)
    assert guilty.startswith(REASONS[how])
    assert theirs.startswith(f"RemoteError: process 1 failed with {REASONS[how]}")
    for same, next_one in after, its_after:
        assert same
        assert next_one.startswith(ENDED)


def test_arguments_that_one_process_refuses(two):
    (theirs, same, after), (guilty, *_) = two.run("failing:fails", "target", 0, True)
    assert guilty.startswith("ValueError: ")
    assert theirs.startswith("RemoteError: process 1 refused with ValueError: ")
    assert same
    assert after.startswith(ENDED)


def test_an_exception_in_one_process_of_three(three):
    found = three.run("failing:fails", "backward", 1, True)
    assert [told.split(":")[0] for told, *_ in found] == [
        "RemoteError",
        "ArithmeticError",
        "RemoteError",
    ]
    assert all(same for _, same, _ in found)


def test_ctrl_c_while_another_process_is_late(two):
    first, second = two.run("failing:interrupted_while_it_waits")
    assert first.startswith("KeyboardInterrupt")
    assert second.startswith("RemoteError: process 0 failed with KeyboardInterrupt")


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("accumulate", "accumulate is 2 there and 1 in process 0"),
        ("evaluates", "the call is 'eval_batch' there and 'train_batch' in process 0"),
        ("frozen", "what its parameters are is "),
    ],
)
def test_calls_that_differ(two, how, what):
    for first, second in two.run("failing:calls_that_differ", how):
        assert first.startswith("ValueError: processes 1 and 0 do not make the same call")
        assert what in first
        assert second.startswith(ENDED)


def test_other_tensors_in_another_process(two):
    for first, second in two.run("failing:calls_that_differ", "found"):
        assert first.startswith("RuntimeError: loss_fn or a layer uses tensors that require grad")
        assert second.startswith(ENDED)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("sparse", "TypeError: a parameter of shape [5, 6] has a sparse gradient"),
        ("nested", "RuntimeError: a data-parallel pipe is trained inside of a call of a pipe"),
    ],
)
def test_what_cannot_be_done(two, how, what):
    for told in two.run("failing:refused", how):
        assert told.startswith(what)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (
            "shape",
            "parameter '2.weight' of shape [4, 6], torch.float32, trained where process 0 has",
        ),
        ("number", "nothing more  where process 0 has parameter '2.bias' of shape [3]"),
        ("frozen", "parameter '1.weight' of shape [6, 6], torch.float32, frozen where process 0"),
        ("balance", "balance [1, 2] where process 0 has balance [2, 1]"),
        ("buffer", "buffer '1.count' of shape [2], torch.float32 where process 0 has nothing more"),
    ],
)
def test_models_that_differ(two, how, what):
    for told in two.run("failing:models_that_differ", how):
        assert told.startswith(f"ValueError: processes have different models: process 1 has {what}")


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("lazy", "ValueError: in process 1: parameter '1.weight' has no value yet"),
        ("sync", "TypeError: in process 1: layer '1' is a SyncBatchNorm"),
    ],
)
def test_models_that_cannot_be_trained_so(two, how, what):
    for told in two.run("failing:models_that_differ", how):
        assert told.startswith(what)


@pytest.mark.parametrize("waits", ["train_batch", "eval_batch"])
def test_a_process_that_makes_fewer_calls(three, waits):
    first, _, third = three.run("failing:does_not_come", waits)
    for told, again in first, third:
        assert told.startswith(
            "LostProcess: process 1 did not come to call 2 of a data-parallel pipe"
        )
        assert again.startswith(ENDED)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("killed", "process 1 does not answer any more, and has probably been killed"),
        ("raises", "process 1 has ended with OSError: the disk is full"),
        ("ends", "process 1 has ended, after call 1"),
    ],
)
def test_a_process_that_is_gone(tmp_path, how, what):
    with ranks(3, tmp_path) as three:
        first, gone, third = three.run("failing:one_is_gone", how)
    assert gone is None
    for told, again in first, third:
        assert told.startswith("LostProcess: ")
        assert what in told
        assert again.startswith(ENDED)
