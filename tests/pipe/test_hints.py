"""What people are told who know another library, or who are in their first hour."""

from __future__ import annotations

import copy
import io
import re
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncpipe
import syncpipe.checkpoints
from syncpipe import Pipe, RepeatingLoader
from tests.support.models import linear_model

pytestmark = pytest.mark.filterwarnings("error::UserWarning:tests.pipe")

CPUS = ["cpu:0", "cpu:1"]
X, Y = torch.randn(8, 3), torch.randint(3, (8,))


def a_pipe(**options: Any) -> Pipe:
    return Pipe(linear_model(2), [1, 1], devices=CPUS, chunks=2, **options)


# --- names ---------------------------------------------------------------------------------------

MEANT = [
    ("Pipe", "num_stages", r"balance=\[\.\.\.\]"),
    ("Pipe", "partition_method", "balance='parameters'"),
    ("Pipe", "topology", r"balance=\[\.\.\.\]"),
    ("Pipe", "worker_map", "devices= names all"),
    ("Pipe", "style", "one process"),
    ("Pipe", "input_device", r"input\.to\(pipe\.devices\[0\]\)"),
    ("Pipe", "split_spec", r"balance=\[\.\.\.\]"),
    ("Pipe", "loss_fn", "pipe.train_batch"),
    ("Pipe", "activation_checkpoint_interval", "checkpoint="),
    ("Pipe", "gradient_accumulation_steps", "chunks="),
    ("Pipe", "chunk", r"did you mean chunks=\?$"),
    ("Pipe", "device", r"did you mean devices=\?$"),
    ("Pipe", "deferred_batchnorm", r"did you mean deferred_batch_norm=\?$"),
    ("Pipe", "optimizer", r"optimizer\.step\(\)"),
    ("Pipe", "nothing_like_it", "(?<='nothing_like_it')$"),
    ("train_batch", "criterion", r"did you mean loss_fn=\?$"),
    ("train_batch", "labels", r"did you mean target=\?$"),
    ("train_batch", "dataloader", r"did you mean data_iter=\?$"),
    ("train_batch", "scheduler", r"did you mean schedule=\?$"),
    ("train_batch", "chunks", r"set pipe\.chunks = \.\.\.$"),
    ("train_batch", "optimizer", r"optimizer\.step\(\)"),
    ("train_batch", "nothing_like_it", "(?<='nothing_like_it')$"),
    ("attribute", "save_checkpoint", "state_dict"),
    ("attribute", "gradient_accumulation_steps", "pipe.chunks"),
    ("attribute", "step", r"optimizer\.step\(\)"),
    ("attribute", "append", "another Pipe"),
    ("attribute", "device", r"pipe\.devices"),
    ("attribute", "partition", r"did you mean pipe\.partitions\?$"),
    ("attribute", "nothing_like_it", "no attribute 'nothing_like_it'$"),
]


@pytest.mark.parametrize(("where", "name", "meant"), MEANT)
def test_a_name_that_is_not_there_is_answered_by_what_is_meant(
    where: str, name: str, meant: str
) -> None:
    calls: dict[str, Any] = {
        "Pipe": lambda: a_pipe(**{name: 2}),
        "train_batch": lambda: a_pipe().train_batch(X, Y, **{name: 2}),
        "attribute": lambda: getattr(a_pipe(), name),
    }
    kind = AttributeError if where == "attribute" else TypeError
    if kind is TypeError:
        meant = rf"{where}\(\) got an unexpected.*'{name}'.*{meant}"
    with pytest.raises(kind, match=meant):
        calls[where]()


def test_a_layer_may_have_such_a_name() -> None:
    layers = nn.Sequential(OrderedDict(step=nn.Linear(3, 3)))
    assert Pipe(layers, [1]).step is layers[0]


# --- values --------------------------------------------------------------------------------------


def a_plan(devices: Any = "2 x 1GB, 1GB/s", **options: Any) -> syncpipe.Plan:
    return syncpipe.plan(
        linear_model(2), X, devices=devices, batch_size=8, timeout=0.01, **options
    )  # fmt: skip


def two(*arguments: Any, **options: Any) -> Any:
    return lambda: Pipe(linear_model(2), *arguments, **options)


def call(name: str, *arguments: Any, **options: Any) -> Any:
    return lambda: getattr(a_pipe(), name)(*arguments, **options)


NO_128 = r"is not a device: PyTorch supports indices 0 to 127"
AUTO = r"pipe\.trace\(\).*schedules\.auto\("


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (two(8), TypeError, r"not 8: did you mean chunks=8\?"),
        (call("__setattr__", "balance", 8), TypeError, r"not 8: did you mean chunks=8\?"),
        (two(True), TypeError, r"must be a list.*True$"),
        (two([True, 1]), TypeError, r"must hold integers: \[True, 1\]"),
        (two([1, 1], devices=["cpu:127", "cpu:300"]), ValueError, f"'cpu:300' {NO_128}"),
        (two([1, 1], devices=[torch.device("cpu:200")] * 2), ValueError, NO_128),
        (lambda: two(a_plan())(), TypeError, r"Pipe\(module, \*\*plan\.options"),
        (two(devices=CPUS), ValueError,
         r'(?s)balance is missing.*balance="parameters".*syncpipe\.balance\.balance_by_time'),
        (two([1, 1], devices=2), TypeError,
         r"devices=2 is a number.*devices=\[0, 1, \.\.\.\].*'cpu:0', 'cpu:1'"),
        (two([1, 1], CPUS, 8), TypeError, r"4 arguments: write Pipe\(module, balance, devices="),
        (call("train_batch", X, Y, F.cross_entropy), TypeError,
         r"given 3 arguments: write train_batch\(input, target, loss_fn=\.\.\.\)"),
        (two([1, 1], devices=True), TypeError, r"must be a list.*not True: write devices=\['cpu:0"),
        (two([1, 1], devices="auto"), TypeError, r"'auto': write devices=\['cpu:0', 'cpu:1'\], or"),
        (two([1, 1], devices="cpu:0, cpu:1"), TypeError, r"write \['cpu:0', 'cpu:1'\]$"),
        (two([1, 1], devices=torch.device("cpu")), TypeError, r"write \[device\(type='cpu'\)\]$"),
        *[(two([1, 1], devices=kind), TypeError, "list of devices, in order, not {'cpu:0'")
          for kind in ({"cpu:0"}, {"cpu:0": 1})],
        (two({1, 2}), TypeError, "balance must be a list"),
        (two([1, 1], replicas={1}), TypeError, "replicas={1}"),
        *[(two([1, 1], **{name: "no"}), TypeError, f"{name}='no': must be True or False")
          for name in ("deferred_batch_norm", "unpack")],
        *[(call("train_batch", X, Y, loss_fn=F.cross_entropy, **{name: value}), TypeError,
           f"{name}={value!r}: must be True or False")
          for name, value in (("return_outputs", "no"), ("verify", "no"), ("global_loss", 2))],
        (call("train_batch", X, Y, loss_fn=F.cross_entropy, accumulate=True), ValueError,
         "accumulate=True: must be the number of"),
        (call("eval_batch", X, Y, loss_fn=F.cross_entropy, global_loss="no"), TypeError,
         "global_loss='no'"),
        (call("__call__", X, X), TypeError, r"one input.*2 arguments \(Tensor, Tensor\).*a tuple"),
        (call("__call__", x=X), TypeError, r"one input.*1 arguments \(x\)"),
        (call("train_batch", X, Y), TypeError,
         r"missing: write train_batch\(input, target, loss_fn="),
        (call("train_batch", data_iter=iter([])), TypeError,
         r"missing: write train_batch\(data_iter=\.\.\., loss_fn="),
        (call("train_stream", [X], optimizer=torch.optim.SGD, loss_fn=None), TypeError,
         r"missing: write train_stream\(data_iter, optimizer=\.\.\., loss_fn="),
        (call("train_batch", data_iter=lambda: iter([]), loss_fn=F.cross_entropy), TypeError,
         "data_iter is a function: call it once for all steps, and give"),
        (call("train_batch", data_iter=X, loss_fn=F.cross_entropy), TypeError,
         r"data_iter is a tensor \(float32\[8, 3\]\)"),
        (lambda: syncpipe.verify(a_pipe(), DataLoader(TensorDataset(X)), loss_fn=F.cross_entropy),
         TypeError, r"one mini-batch.*input, target = next\(iter\(loader\)\)"),
        (lambda: Pipe.auto(linear_model(2), X, batch_size=8, devices=CPUS, loss_fn=F.cross_entropy),
         TypeError, "Pipe.auto.*give the target="),
        (two([1, 1], schedule="auto"), ValueError, AUTO),
        (call("train_batch", X, loss_fn=torch.mean, schedule="auto"), ValueError, AUTO),
        (two("time", devices=CPUS), ValueError, "give Pipe a sample="),
        (two("uniform", sample=X, devices=CPUS), ValueError, "balance='time' measures with"),
        (lambda: torch.jit.script(a_pipe()), TypeError, r"jit\.script\(pipe\[:\]\)"),
        (lambda: setattr(pipe := a_pipe(), "loss", nn.MSELoss()) or pipe(X), ValueError,
         "loss: a module that is no layer was assigned.*: del it, and keep it elsewhere"),
        (lambda: a_pipe().trace().table(), RuntimeError, r"`with pipe\.trace\(\) as trace:`"),
    ],
)  # fmt: skip
def test_what_is_meant_otherwise_is_answered(
    wrong: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        wrong()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there it is a device")
@pytest.mark.parametrize("device", [0, "cuda:0", "cuda", torch.device("cuda", 0)])
def test_without_an_accelerator_its_number_and_its_name_are_refused_alike(device: Any) -> None:
    with pytest.raises(ValueError, match=r"accelerator.*'cpu:0', 'cpu:1'") as caught:
        Pipe(linear_model(2), [1, 1], devices=[device, device])
    assert repr(device) in str(caught.value)
    with pytest.raises(ValueError, match=r"is an accelerator, but"):
        a_plan(devices=[device, device])


def test_a_plan_for_real_devices_runs_on_those_that_the_pipe_is_given() -> None:
    plan = a_plan(devices=CPUS, stages=2, memory="1GB")
    for devices in (list(plan.devices or ()), ["cpu:2", "cpu:3"]):
        pipe = Pipe(linear_model(2), **plan.options(), devices=devices)
        assert list(map(str, pipe.devices)) == list(map(str, devices))
    pipe = Pipe(linear_model(6), balance="time", sample=X, devices=CPUS, chunks=2)
    assert (len(pipe.balance), sum(pipe.balance)) == (2, 6)


# --- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("input", "note"),
    [
        ((X, Y), r"tuple of 2.*{}\(\*pair, loss_fn"),
        ([X, X, Y], r"list of 3.*{}\(batch\[:-1\], batch\[-1\], loss_fn"),
        ({"x": X, "labels": Y}, r"dict of 2.*'x', 'labels'.*target='labels', loss_fn"),
    ],
)
@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_an_input_with_its_target_inside_is_noted(input: Any, note: str, call: str) -> None:
    with pytest.raises(TypeError, match="must be Tensor") as caught:
        getattr(a_pipe(), call)(input, loss_fn=F.cross_entropy)
    assert re.search(note.replace("{}", call), caught.value.__notes__[-1])


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("checkpoint", ["except_last", "never"])
@pytest.mark.parametrize(("balance", "frozen"), [([1, 1], False), ([1, 1], True), ([2], False)])
def test_a_loss_function_that_calls_backward_is_told_so(
    balance: list[int], frozen: bool, checkpoint: str, retain: bool
) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output, target)
        loss.backward(retain_graph=retain)
        return loss

    pipe = Pipe(linear_model(2), balance, devices=CPUS, chunks=2, checkpoint=checkpoint)
    pipe[0].requires_grad_(not frozen)
    with pytest.raises(RuntimeError, match=r"loss_fn must not call backward\(\): train_batch"):
        pipe.train_batch(X, Y, loss_fn=loss_fn)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    pipe.train_batch(X, Y, loss_fn=F.cross_entropy)


def test_a_loss_function_may_ask_for_the_gradient_of_the_output() -> None:
    def penalised(output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output, target)
        (grad,) = torch.autograd.grad(loss, output, create_graph=True)
        return loss + grad.square().sum()

    with pytest.warns(UserWarning, match="loss_fn is not checked"):  # that runs without gradients
        assert a_pipe().train_batch(X, Y, loss_fn=penalised).isfinite()


@pytest.mark.parametrize("outputs", [False, True])
def test_backward_after_train_batch_is_told_that_it_has_run(outputs: bool) -> None:
    found: Any = a_pipe().train_batch(X, Y, loss_fn=F.cross_entropy, return_outputs=outputs)
    loss = found[0] if outputs else found
    with pytest.raises(RuntimeError, match="train_batch has run backward already"):
        loss.backward()
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["loss"]
    assert torch.equal(copy.deepcopy(loss), loss)
    assert torch.equal(loaded, loss)
    assert not vars(loaded)
    weight = torch.ones((), requires_grad=True)
    (loss + weight).backward()
    loss += weight
    loss.backward()
    assert weight.grad == 2


def test_a_model_whose_layers_change_after_it_was_made_a_pipe_is_warned_about_once() -> None:
    model = linear_model(2)
    pipe = Pipe(model, [1, 1], devices=CPUS)
    expected = pipe(X)
    pipe[0] = pipe[0]
    model.append(nn.ReLU())
    with pytest.warns(UserWarning, match=r"other layers now \(3, was 2\)"):
        assert torch.equal(pipe(X), expected)
    pipe(X)  # which would be an error: warnings are errors here


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


def test_without_safetensors_checkpoints_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    (tmp_path / "model.safetensors").touch()
    for call in (syncpipe.checkpoints.save, syncpipe.checkpoints.load):
        with pytest.raises(ImportError, match=r"pip install 'syncpipe\[safetensors\]'"):
            call(a_pipe(), tmp_path)


@pytest.mark.parametrize("count", [lambda kept: kept.sum(), lambda kept: int(kept.sum())])
@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_a_metric_that_counts_is_warned_of(call: str, count: Any) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Any:
        kept = output.argmax(1) == target
        rate = {"rate": kept.float().mean(), "all": kept.all(), "each": kept.sum().reshape(1)}
        return F.cross_entropy(output, target, reduction=reduction), {"n": count(kept), **rate}

    reduction = "mean"
    with pytest.warns(UserWarning, match="metric 'n' is an integer.*a rate, not a count") as seen:
        getattr(a_pipe(), call)(X, Y, loss_fn=loss_fn)
    assert len(seen) == 1
    reduction = "sum"
    getattr(a_pipe(), call)(X, Y, loss_fn=loss_fn, loss_reduction="sum")
