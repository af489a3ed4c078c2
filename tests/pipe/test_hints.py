"""What people are told who know another library, or who are in their first hour."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncpipe
from syncpipe import Pipe, RepeatingLoader
from tests.support.models import linear_model

pytestmark = pytest.mark.filterwarnings("error::UserWarning:tests.pipe")

CPUS = ["cpu:0", "cpu:1"]
X, Y = torch.randn(8, 3), torch.randint(3, (8,))
NO_ACCELERATOR = pytest.mark.skipif(torch.accelerator.is_available(), reason="there it is a device")


def a_pipe(**options: Any) -> Pipe:
    return Pipe(linear_model(2), [1, 1], devices=CPUS, chunks=2, **options)


# --- names ---------------------------------------------------------------------------------------

OF_PIPE = {
    "num_stages": r"balance=\[\.\.\.\]",
    "n_stages": r"balance=\[\.\.\.\]",
    "partition_method": "balance='parameters'",
    "loss_fn": "pipe.train_batch",
    "activation_checkpoint_interval": "checkpoint='always'",
    "checkpointable_layers": "checkpoint=lambda",
    "gradient_accumulation_steps": "chunks=",
    "num_chunks": "chunks=",
    "microbatches": "chunks=",
    "chunk": r"did you mean chunks=\?$",
    "seed_layers": "seed=",
    "device": r"did you mean devices=\?$",
    "deferred_batchnorm": r"did you mean deferred_batch_norm=\?$",
    "optimizer": r"optimizer\.step\(\)",
    "nothing_like_it": "(?<='nothing_like_it')$",
}
OF_TRAIN_BATCH = {
    "criterion": r"did you mean loss_fn=\?$",
    "inputs": r"did you mean input=\?$",
    "labels": r"did you mean target=\?$",
    "scaler": r"did you mean grad_scaler=\?$",
    "dataloader": r"did you mean data_iter=\?$",
    "scheduler": r"did you mean schedule=\?$",
    "chunks": r"set pipe\.chunks = \.\.\.$",
    "optimizer": r"optimizer\.step\(\)",
    "nothing_like_it": "(?<='nothing_like_it')$",
}


@pytest.mark.parametrize("name", OF_PIPE)
def test_an_argument_that_a_pipe_does_not_have(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Pipe\(\) got an unexpected.*'{name}'.*{OF_PIPE[name]}"):
        a_pipe(**{name: 2})


@pytest.mark.parametrize("name", OF_TRAIN_BATCH)
def test_an_argument_that_train_batch_does_not_have(name: str) -> None:
    with pytest.raises(TypeError, match=rf"train_batch\(\) .*'{name}'.*{OF_TRAIN_BATCH[name]}"):
        a_pipe().train_batch(X, Y, **{name: 2})


ATTRIBUTES = {
    "save_checkpoint": "state_dict",
    "load_checkpoint": "load_state_dict",
    "gradient_accumulation_steps": "pipe.chunks",
    "train_micro_batch_size_per_gpu": "pipe.chunks",
    "step": r"optimizer\.step\(\)",
    "backward": "train_batch",
    "append": "another Pipe",
    "device": r"pipe\.devices",
    "stages": r"pipe\.partitions",
    "layers": r"\[\*pipe\]",
    "evaluate": "eval_batch",
    "verify": r"syncpipe\.verify",
    "partition": r"did you mean pipe\.partitions\?$",
    "nothing_like_it": "no attribute 'nothing_like_it'$",
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_a_pipe_does_not_have(name: str) -> None:
    pipe = a_pipe()
    with pytest.raises(AttributeError, match=ATTRIBUTES[name]):
        getattr(pipe, name)
    assert not hasattr(pipe, name)


def test_a_layer_may_have_such_a_name() -> None:
    layers = nn.Sequential()
    layers.add_module("step", nn.Linear(3, 3))
    assert Pipe(layers, [1]).step is layers[0]


# --- values --------------------------------------------------------------------------------------


def a_plan(**options: Any) -> syncpipe.Plan:
    devices = {"devices": "2 x 1GB, 1GB/s", **options}
    return syncpipe.plan(linear_model(2), X, batch_size=8, timeout=0.01, **devices)


def set_to(name: str, value: Any) -> None:
    setattr(a_pipe(), name, value)


WRONG = {
    "a number as balance": (
        lambda: Pipe(linear_model(2), 8),
        TypeError,
        r"not 8: did you mean chunks=8\?",
    ),
    "set": (lambda: set_to("balance", 8), TypeError, r"not 8: did you mean chunks=8\?"),
    "a bool as balance": (lambda: Pipe(linear_model(2), True), TypeError, r"must be a list.*True$"),
    "a bool in balance": (
        lambda: Pipe(linear_model(4), [True, 3]),
        TypeError,
        r"balance must hold integers: \[True, 3\]",
    ),
    "device 300": (
        lambda: Pipe(linear_model(2), [1, 1], devices=["cpu:127", "cpu:300"]),
        ValueError,
        "'cpu:300' is not a device: PyTorch knows the numbers 0 to 127",
    ),
    "device 200 as an object": (
        lambda: Pipe(linear_model(2), [1, 1], devices=[torch.device("cpu:200")] * 2),
        ValueError,
        "is not a device: PyTorch knows the numbers 0 to 127",
    ),
    "a plan as balance": (
        lambda: Pipe(linear_model(2), a_plan()),
        TypeError,
        r"Pipe\(module, \*\*plan\.options\(\)\)",
    ),
    "no balance": (
        lambda: Pipe(linear_model(4), devices=CPUS),
        ValueError,
        r'(?s)balance is missing.*balance="parameters".*syncpipe\.balance\.balance_by_time',
    ),
    "a number of devices": (
        lambda: Pipe(linear_model(2), [1, 1], devices=2),
        TypeError,
        r"devices=2 is a number.*devices=\[0, 1, \.\.\.\].*'cpu:0', 'cpu:1'",
    ),
    "four arguments": (
        lambda: Pipe(linear_model(2), [1, 1], CPUS, 8),
        TypeError,
        r"given 4 arguments: write Pipe\(module, balance, devices=\.\.\.\)",
    ),
    "the loss by position": (
        lambda: a_pipe().train_batch(X, Y, F.cross_entropy),
        TypeError,
        r"given 3 arguments: write train_batch\(input, target, loss_fn=\.\.\.\)",
    ),
    "no loss": (lambda: a_pipe().train_batch(X, Y), TypeError, "loss_fn is missing"),
    "schedule auto": (
        lambda: a_pipe(schedule="auto"),
        ValueError,
        r"pipe\.trace\(\).*schedules\.auto\(",
    ),
    "schedule auto in a call": (
        lambda: a_pipe().train_batch(X, loss_fn=torch.mean, schedule="auto"),
        ValueError,
        r"pipe\.trace\(\).*schedules\.auto\(",
    ),
    "time without a sample": (
        lambda: Pipe(linear_model(2), "time", devices=CPUS),
        ValueError,
        "give Pipe a sample=",
    ),
    "a sample without time": (
        lambda: Pipe(linear_model(2), "uniform", sample=X, devices=CPUS),
        ValueError,
        "sample= is what balance='time'",
    ),
    "a trace without a block": (
        lambda: a_pipe().trace().table(),
        RuntimeError,
        r"`with pipe\.trace\(\) as trace:`",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_meant_otherwise_is_answered(case: str) -> None:
    wrong, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        wrong()


@NO_ACCELERATOR
@pytest.mark.parametrize("device", [0, "cuda:0", "cuda", torch.device("cuda", 0)])
def test_without_an_accelerator_its_number_and_its_name_are_refused_alike(device: Any) -> None:
    with pytest.raises(ValueError, match=r"accelerator") as caught:
        Pipe(linear_model(2), [1, 1], devices=[device, device])
    assert repr(device) in str(caught.value)
    assert "'cpu:0', 'cpu:1'" in str(caught.value)


@NO_ACCELERATOR
def test_plan_refuses_the_number_of_an_accelerator_that_is_not_here() -> None:
    with pytest.raises(ValueError, match=r"0 is an accelerator, but"):
        a_plan(devices=[0, 1])


def test_a_plan_for_real_devices_runs_on_those_that_the_pipe_is_given() -> None:
    plan = a_plan(devices=CPUS, stages=2, memory="1GB")
    assert Pipe(linear_model(2), **plan.options(), devices=plan.devices).devices == [
        torch.device("cpu", 0),
        torch.device("cpu", 1),
    ]
    elsewhere = Pipe(linear_model(2), **plan.options(), devices=["cpu:2", "cpu:3"])
    assert elsewhere.devices == [torch.device("cpu", 2), torch.device("cpu", 3)]


def test_a_balance_by_time_in_one_line() -> None:
    pipe = Pipe(linear_model(6), balance="time", sample=X, devices=CPUS, chunks=2)
    assert len(pipe.balance) == 2
    assert sum(pipe.balance) == 6


# --- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("input", "note"),
    [
        ((X, Y), r"tuple of 2.*train_batch\(\*pair, loss_fn"),
        ([X, X, Y], r"list of 3.*train_batch\(batch\[:-1\], batch\[-1\], loss_fn"),
        ({"x": X, "labels": Y}, r"'x', 'labels'.*target='labels'"),
    ],
)
@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_an_input_with_its_target_inside_is_noted(input: Any, note: str, call: str) -> None:
    with pytest.raises(TypeError, match="must be Tensor") as caught:
        getattr(a_pipe(), call)(input, loss_fn=F.cross_entropy)
    assert re.search(note, caught.value.__notes__[-1])


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("balance", [[1, 1], [2]])
def test_a_loss_function_that_calls_backward_is_told_so(
    balance: list[int], mode: str, retain: bool
) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output, target)
        loss.backward(retain_graph=retain)
        return loss

    pipe = Pipe(linear_model(2), balance, devices=CPUS, chunks=2, checkpoint=mode)
    with pytest.raises(RuntimeError, match=r"loss_fn must not call backward\(\): train_batch"):
        pipe.train_batch(X, Y, loss_fn=loss_fn)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    pipe.train_batch(X, Y, loss_fn=F.cross_entropy)


def test_a_loss_function_may_ask_for_the_gradient_of_the_output() -> None:
    def penalised(output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output, target)
        (grad,) = torch.autograd.grad(loss, output, create_graph=True)
        return loss + grad.square().sum()

    assert a_pipe().train_batch(X, Y, loss_fn=penalised).isfinite()


@pytest.mark.parametrize("outputs", [False, True])
def test_backward_after_train_batch_is_told_that_it_has_run(outputs: bool) -> None:
    found: Any = a_pipe().train_batch(X, Y, loss_fn=F.cross_entropy, return_outputs=outputs)
    loss = found[0] if outputs else found
    with pytest.raises(RuntimeError, match="train_batch has run backward already"):
        loss.backward()
    for copied in (copy.deepcopy(loss), saved(loss)):
        assert torch.equal(copied, loss)
    weight = torch.ones((), requires_grad=True)
    (loss + weight).backward()
    loss += weight
    loss.backward()
    assert weight.grad == 2


def saved(loss: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    found: Tensor = torch.load(file, weights_only=True)["loss"]
    assert not vars(found)
    return found


def test_an_iterator_of_a_loader_of_whole_mini_batches_is_warned_about() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    pipe = a_pipe()
    with pytest.warns(UserWarning, match="each of its batches is one micro-batch"):
        pipe.train_batch(data_iter=iter(loader), loss_fn=F.cross_entropy)
    pipe.train_batch(data_iter=iter(RepeatingLoader(loader)), loss_fn=F.cross_entropy)
    pipe.train_batch(data_iter=loader, loss_fn=F.cross_entropy)
    pipe.chunks = 1
    pipe.train_batch(data_iter=iter(loader), loss_fn=F.cross_entropy)


def test_a_normalisation_of_one_sample_says_what_to_do() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), [1, 1], chunks=4)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        pipe.train_batch(torch.randn(7, 3), loss_fn=torch.mean)
    assert any("drop_last=True" in note for note in caught.value.__notes__)
