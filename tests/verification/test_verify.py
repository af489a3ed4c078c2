"""Models without a fault, to the last bit; and with one each: the report names layer and reason."""

from __future__ import annotations

import re
from functools import partial
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import NoChunk, Pipe, is_recomputing, sequential, verify
from syncpipe.schedules import SCHEDULES, one_f_one_b
from syncpipe.verification.report import Report
from tests.support.models import Counter as Changes
from tests.support.running import Do, Using
from tests.support.skips import Receive
from tests.support.training import FOUR, ROUND, V, any_schedule, fitting
from tests.verification.models import (
    WIDTH,
    Counter,
    Memory,
    OwnGenerator,
    Send,
    TwoBiases,
    batch,
    linear,
    pipe_of,
    scale,
)


class Heads(nn.Module):
    """Uses the number of samples again, behind a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = linear(), nn.Dropout(), linear()

    def forward(self, x: Tensor) -> Tensor:
        samples = x.shape[0]
        y = self.drop(self.first(x).view(samples, 2, -1)).relu()
        return self.last(y.reshape(samples, -1)) + x


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = linear(), nn.Dropout(), linear()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.last(self.drop(self.first(x)) * mask + x)


def with_auxiliary(x: Tensor, layer: nn.Module) -> Any:
    y = layer(x)
    return {"logits": y, "aux": y.square().mean()}


def tied() -> list[nn.Module]:
    embedding, block, head = nn.Embedding(9, WIDTH), linear(), nn.Linear(WIDTH, 9, bias=False)
    head.weight = embedding.weight
    return [embedding, nn.Dropout(0.1), block, nn.Tanh(), block, head]


MODELS: dict[str, Any] = {
    "plain": lambda: [linear(), nn.Tanh(), linear(), nn.GELU(), linear()],
    "dropout": lambda: [linear(), nn.Dropout(), linear(), nn.Dropout(0.1), linear()],
    "skips": lambda: [Send(), linear(), nn.Dropout(), Receive(), linear()],
    "in place": lambda: [scale(), linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(True)],
    "attention": lambda: [
        nn.Unflatten(1, (2, WIDTH // 2)),
        nn.TransformerEncoderLayer(WIDTH // 2, 1, 8, batch_first=True),
        nn.Flatten(),
        linear(),
        nn.LayerNorm(WIDTH),
    ],
}


def checked(pipe: Pipe, data: Any = None, loss_fn: Any = F.cross_entropy, **options: Any) -> Report:
    return verify(pipe, *(data or batch()), loss_fn=loss_fn, **options)


def assert_exact(report: Report, *, beside: bool = True, in_one_order: bool = True) -> None:
    """Bits everywhere in the pipe, but for gradients that are added up in another order.

    Those are so where a schedule splits backward, or has another order in each stage.
    """
    assert report.pipe_ok, report
    assert report.ok or not beside, report
    for run in report.runs:
        if not run.of_pipe or run.not_applicable:
            continue
        splits = run.name.startswith(("zb", "v_", "dualpipev", "interleaved_zero"))
        for column, found in run.comparisons.items():
            exact = found.status in ("equal", "none")
            assert exact or ((splits or not in_one_order) and column == "gradients"), (
                f"{run.name} {column}\n{report}"
            )


@settings(max_examples=25)
@given(data=st.data())
def test_any_pipe_of_a_clean_model_is_ok(data: st.DataObject) -> None:
    layers = MODELS[data.draw(st.sampled_from(list(MODELS)))]()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(layers) - 1), max_size=3)))
    balance = [b - a for a, b in pairwise([0, *cuts, len(layers)])]
    pipe = pipe_of(
        *layers,
        balance=balance,
        chunks=data.draw(st.integers(1, 5)),
        checkpoint=data.draw(st.sampled_from(["always", "except_last", "never"])),
    ).train(training := data.draw(st.booleans()))
    x, y = batch(data.draw(st.integers(4, 13)))
    y[: data.draw(st.integers(0, 3))] = -100
    m, seed = len(x.chunk(pipe.chunks)), data.draw(st.integers(0, 999))
    own = any_schedule(m, range(len(balance)), seed=seed, halves=False, in_order=True)
    schedule = data.draw(st.sampled_from(["naive", "gpipe", "1f1b", "zb_h1", "zb_h2", own]))
    report = checked(pipe, (x, y), schedules=[schedule])
    orders = {
        tuple(a.i for row in own.actions for a in row if a.j == j and a.kind == "backward")
        for j in range(len(balance))
    }
    assert_exact(report, in_one_order=schedule is not own or len(orders) == 1)
    assert report.runs[-1].comparisons["outputs"].status == "equal"
    assert str(report).splitlines()[-1].startswith("OK: the pipe computes")
    assert ("eval() mode" in report.header) is not training
    assert pipe.training == training


@pytest.mark.parametrize("devices", [FOUR, ROUND, V], ids=["four", "round", "v"])
def test_every_schedule_runs_where_the_devices_allow_it(devices: list[str]) -> None:
    pipe = pipe_of(linear(), linear(), nn.Dropout(), linear(), balance=[1] * 4, devices=devices)
    report = checked(pipe)
    assert_exact(report)
    for name in SCHEDULES:
        fits = name in fitting([devices.index(device) for device in devices])
        assert bool(report[name].not_applicable) is not fits
        assert report[name].comparisons["outputs"].status == ("equal" if fits else "none")


@pytest.mark.parametrize("balance", [[3, 3], [2, 2, 2], [1] * 6], ids=str)
def test_tied_weights(balance: list[int]) -> None:
    x = torch.randint(9, (11,))
    report = checked(pipe_of(*tied(), balance=balance), (x, x))
    assert report["pipe(x)"].ok  # a weight that is used twice is added up in another order
    report.runs.remove(report["pipe(x)"])
    assert_exact(report)


def test_inputs_of_all_kinds() -> None:
    x, y = batch()
    layers = [Do(torch.mul), torch.tanh, linear()]
    assert_exact(checked(pipe_of(*layers, chunks=3, unpack=True), ((x, x + 1), y)))
    converted = sequential(Masked(), x, mask=x > 0)
    pipe = pipe_of(*converted, balance=[1, len(converted) - 1])
    assert_exact(checked(pipe, ({"x": x, "mask": x > 0}, y)))
    tree = {"x": x, "scale": NoChunk(torch.randn(WIDTH)), "ids": torch.arange(12), "labels": y}
    first = lambda d: (d["x"] * d["scale"], d["ids"])  # noqa: E731
    pipe = pipe_of(first, lambda pair: pair[0] * pair[1][:, None].float(), linear())
    report = checked(pipe, (tree, "labels"))
    assert_exact(report)
    assert report["1f1b"].comparisons["input_gradients"].status == "equal"
    assert_exact(checked(pipe_of(linear(), TwoBiases(), linear()), batch(4)))


@pytest.mark.parametrize("training", [True, False])
def test_a_number_of_samples_between_layers(training: bool) -> None:
    x = torch.randn(8, WIDTH)
    layers = sequential(Heads(), x[:4])
    pipe = Pipe(layers, balance="parameters", devices=FOUR[:2], chunks=4).train(training)
    report = verify(pipe, x, x, loss_fn=F.mse_loss)
    assert report.ok, str(report)


@pytest.mark.parametrize("threads", [1, 2])
def test_with_so_many_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        wide = [nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, WIDTH)]
        assert_exact(checked(pipe_of(*wide), batch(203)))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_what_is_equal_to_rounding_or_not_compared() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert checked(pipe_of(*MODELS["plain"]())).ok
    report = checked(
        pipe_of(*MODELS["plain"]()), loss_fn=lambda o, t: F.cross_entropy(F.dropout(o), t)
    )
    assert_exact(report)
    assert report["loss of each micro-batch"].comparisons["loss"].status == "none"
    assert report["pipe(x)"].comparisons["gradients"].status == "equal"
    report = checked(
        pipe_of(linear(), nn.Tanh(), Using(with_auxiliary, linear())),
        loss_fn=lambda o, t: F.cross_entropy(o["logits"], t) + 0.1 * o["aux"],
    )
    assert report.ok, report
    assert report["1f1b"].comparisons["gradients"].status == "equal"
    assert "without dimensions" in report["pipe(x)"].not_applicable
    norms = [linear(), nn.BatchNorm1d(WIDTH), linear(), nn.BatchNorm1d(WIDTH)]
    report = checked(pipe_of(*norms, deferred_batch_norm=True))
    assert_exact(report, beside=False)
    assert "BatchNorm sees micro-batches" in str(report)
    assert "its running statistics are those of mini-batches" in str(report)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("weighed", [False, True])
def test_a_loss_with_parameters_and_perhaps_with_weight_and_metrics(weighed, checkpoint) -> None:
    head, (x, y) = linear(), batch()
    y[: 5 * weighed] = -100

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        loss, kept = F.cross_entropy(head(output), target), (target != -100).sum()
        return (loss, kept, {"kept": kept}) if weighed else loss

    report = checked(pipe_of(*MODELS["dropout"](), checkpoint=checkpoint), (x, y), loss_fn)
    assert_exact(report)
    assert head.weight.grad is None


# --- arguments -----------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    pipe, (x, y) = pipe_of(), batch()
    empty, lazy = Pipe([], [], devices=["cpu:0"]), pipe_of(nn.LazyLinear(6), linear(), linear())
    for error, message, args, options in [
        (TypeError, "takes a syncpipe.Pipe, not Sequential", (nn.Sequential(), x, y), {}),
        (ValueError, "no layers", (empty, x, y), {}),
        (TypeError, "is a class", (pipe, x, y), {"loss_fn": nn.CrossEntropyLoss}),
        (ValueError, "did you mean 'gpipe'", (pipe, x, y), {"schedules": ["gpip"]}),
        (TypeError, "must be a name", (pipe, x, y), {"schedules": [3]}),
        (ValueError, "neither an input", (pipe, None), {}),
        (ValueError, "cannot be cut", (pipe, x, y[:5]), {}),
        (ValueError, r"0\.(weight|bias) is a lazy parameter.*run the model once", (lazy, x, y), {}),
    ]:
        with pytest.raises(error, match=message):
            verify(*args, **{"loss_fn": F.cross_entropy, **options})
    with torch.inference_mode(), pytest.raises(RuntimeError, match="call it outside"):
        verify(pipe, x, y, loss_fn=F.cross_entropy)
    with pytest.raises(RuntimeError, match="shapes") as caught:
        checked(pipe_of(linear(), linear(), nn.Linear(3, 3)))
    notes = " ".join(caught.value.__notes__)
    assert "layer 2 ('2': Linear)" in notes
    assert "on the whole mini-batch" in notes


def test_the_schedules_that_are_asked_for() -> None:
    pipe = pipe_of()
    report = checked(pipe, schedules=["zbv", "gpipe"])
    assert [run.name for run in report.runs[3:]] == ["zbv", "gpipe"]
    assert "two stages on each device" in report["zbv"].not_applicable
    assert "not run: zbv (needs two stages" in str(report)
    lines = str(report).splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) <= 100
    assert "balance=[2, 1], 4 micro-batches, checkpoint='except_last'" in lines[0]
    own = partial(one_f_one_b, slots="overlap")
    assert len(checked(pipe, schedules=own).runs) == 4
    pipe.schedule = own
    found = checked(pipe)["partial(one_f_one_b, slots='overlap')"]
    assert found.comparisons["outputs"].status == "equal"


def test_a_loss_is_checked_in_the_first_call_as_ever() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    pipe, (x, y) = pipe_of(), batch()
    y[:2] = -100
    assert checked(pipe, (x, y), loss_fn, weight=lambda t: (t != -100).sum()).ok
    with pytest.warns(UserWarning, match="weight="):
        pipe.train_batch(x, y, loss_fn=loss_fn)


def test_a_mean_among_the_outputs_of_one_micro_batch() -> None:
    pipe = pipe_of(linear(), linear(), lambda y: (y, y.mean()), chunks=1)
    assert_exact(checked(pipe, [torch.randn(4, WIDTH)], loss_fn=lambda out: out[0].sum() + out[1]))


def test_hooks_of_partitions_no_target_and_one_that_needs_a_gradient() -> None:
    pipe, x, y = pipe_of(linear(), nn.Dropout(), linear()), *torch.randn(2, 12, WIDTH)
    pipe.partitions[0].register_forward_hook(lambda module, args, output: output * 2)
    assert_exact(checked(pipe, (x,), lambda output: output.square().mean()))
    assert_exact(checked(pipe, (x, y.requires_grad_()), F.mse_loss))
    assert y.grad is None


# --- models with a fault --------------------------------------------------------------------------


class Injects(torch.autograd.Function):
    """Adds the gradient of another loss in backward, as layers of experts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.drop = linear(), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        return self.drop(Injects.apply(x + share, 0.1 * share.mean(0).square().sum()))


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_gradients_that_a_layer_adds_in_its_backward(training: bool, scalar: bool) -> None:
    last = [Do(lambda y: (y, y.mean()))] if scalar else []
    loss_fn = (lambda o, t: F.cross_entropy(o[0], t) + o[1]) if scalar else F.cross_entropy
    for layer, ok in ((linear(), True), (Balanced(), False)):
        layers = [linear(), nn.Dropout(), layer, linear(), *last]
        pipe = pipe_of(*layers, balance=[2, len(layers) - 2]).train(training)
        report = checked(pipe, loss_fn=loss_fn, schedules="1f1b")
        assert report.pipe_ok
        assert report.ok is ok, report
        run = report["loss of each micro-batch"]
        assert run.comparisons["gradients"].status == ("rounding" if ok else "different")
        if not ok:
            assert "2.gate.weight" in run.comparisons["gradients"].names
            where, reason = reason_of(report, "loss of each micro-batch")
            assert where == "layer 2 ('2': Balanced), by its gradients"
            assert reason.startswith("something adds to gradients")


def reason_of(report: Report, run: str) -> tuple[str, str]:
    """Where a run differs, and why."""
    assert not report.ok
    assert report[run].reason in " ".join(str(report).split())
    return report[run].where, report[run].reason


CALLS = count(1)
#: Layers with a culprit; where it is, the reason, and the runs that differ: of the plain model on
#: micro-batches, and of the pipe.
CULPRITS: dict[str, Any] = {
    "batch norm": (
        lambda: [linear(), nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU()), linear()],
        "layer 1 ('1': Sequential)", "BatchNorm sees micro-batches (0: BatchNorm1d)", False,
    ),
    "batch norm beside dropout": (
        lambda: [nn.Dropout(), linear(), nn.Dropout(), nn.BatchNorm1d(WIDTH), linear()],
        "layer 3 ('3': BatchNorm1d)", "BatchNorm sees micro-batches", False,
    ),
    "samples look at each other": (
        lambda: [linear(), Do(lambda x: x - x.mean(0)), linear()],
        "layer 1 ('1': Do)", "its output for a sample depends on the other samples", False,
    ),
    "a buffer": (
        lambda: [linear(), Changes(), linear()],
        "layer 1 ('1': Counter)", "it keeps state (scale changes in forward)", False,
    ),
    "a generator": (
        lambda: [linear(), OwnGenerator(), linear()],
        "layer 1 ('1': OwnGenerator)", "it draws from a generator of its own (source)", True,
    ),
    "an attribute": (
        lambda: [linear(), linear(), Counter(), linear()],
        "layer 2 ('2': Counter)", "it keeps state (count changes in forward)", True,
    ),
    "something in no module": (
        lambda: [linear(), Do(lambda x: x * next(CALLS)), linear()],
        "layer 1 ('1': Do)", "it does not give the same twice", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CULPRITS)
def test_the_layer_and_the_reason(name: str) -> None:
    layers, where, reason, in_pipe = CULPRITS[name]
    report = verify(pipe_of(*layers()), *batch(), loss_fn=F.cross_entropy)
    for run in ("micro-batches", *(("pipe(x)", "1f1b") if in_pipe else ())):
        found = reason_of(report, run)
        assert found[0] == where
        assert found[1].startswith(reason)
    assert report["1f1b"].ok is not in_pipe


def test_what_does_no_harm_is_no_fault() -> None:
    report = verify(pipe_of(linear(), Memory(), linear()), *batch(), loss_fn=F.cross_entropy)
    assert report["1f1b"].comparisons["gradients"].status == "equal"
    pipe = pipe_of(linear(), OwnGenerator(), linear(), checkpoint="never")
    assert verify(pipe, *batch(), loss_fn=F.cross_entropy).pipe_ok
    pipe = pipe_of(Send(), scale(), linear(), Receive(), balance=[2, 2])
    assert verify(pipe, *batch(), loss_fn=F.cross_entropy).ok


MEAN = lambda output, target: F.cross_entropy(output, target)  # noqa: E731
SUM = lambda output, target: F.cross_entropy(output, target, reduction="sum")  # noqa: E731


@pytest.mark.parametrize(
    ("loss_fn", "taken_for", "words"),
    [(MEAN, None, ["it is no mean over samples", "weight="]), (MEAN, "sum", ["loss_reduction="]),
     (SUM, "mean", ["loss_reduction="])],
)  # fmt: skip
def test_a_masked_loss_that_was_taken_for_something_else(loss_fn, taken_for, words) -> None:
    x, y = batch()
    y[:2] = y[5] = -100
    report = verify(pipe_of(), x, y, loss_fn=loss_fn, loss_reduction=taken_for)
    where, reason = reason_of(report, "loss of each micro-batch")
    assert where == ""
    assert all(word in reason for word in words)
    assert "verify=False" not in reason
    assert report.pipe_ok
    assert report["micro-batches"].ok


def fails_again(x: Tensor) -> None:
    if is_recomputing():
        raise ZeroDivisionError("only once")


def test_errors_that_come_in_some_runs_only() -> None:
    report = verify(pipe_of(linear(), Do(fails_again), linear()), *batch(), loss_fn=F.cross_entropy)
    assert report["pipe(x)"].error.startswith("ZeroDivisionError: only once")
    assert str(report).count("likely reason: ") == 1
    assert re.search(r"- pipe\(x\), .*gpipe, .*1f1b", str(report))
    assert "FAILED" in str(report)
    pipe = pipe_of(linear(), nn.BatchNorm1d(WIDTH), linear())
    report = verify(pipe, *batch(13), loss_fn=F.cross_entropy)
    _, reason = reason_of(report, "micro-batches")
    assert "drop_last" in reason
    assert "in layer 1 ('1': BatchNorm1d), micro-batch 3" in report["1f1b"].what
    pipe = pipe_of(Send(), scale(), linear(), Receive(), balance=[1, 3])
    report = verify(pipe, *batch(), loss_fn=F.cross_entropy)
    assert report["micro-batches"].ok
    where, reason = reason_of(report, "1f1b")
    assert where == "layer 1 ('1': Do)"
    assert reason.startswith("it works in place")
    assert report["1f1b"].error.startswith("RuntimeError")


# --- layers that draw, on the mini-batch and on its micro-batches --------------------------------


class Centred(nn.Module):
    """Subtracts the mean of all samples."""

    def __init__(self, drops: Any) -> None:
        super().__init__()
        self.linear, self.drops = linear(), drops

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.drops(x - x.mean(0), self.training)


def squares(y: Tensor) -> Tensor:
    return y.square().mean()


def always(x: Tensor, training: bool) -> Tensor:
    return F.dropout(x, 0.1)


def in_training(x: Tensor, training: bool) -> Tensor:
    return F.dropout(x, 0.1, training)


OTHERS = {
    "BatchNorm": (nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Dropout()), "BatchNorm sees"),
    "a mean": (Centred(in_training), "depends on the other samples"),
    "a mean, and a module": (
        nn.Sequential(Centred(lambda x, _: x), nn.Dropout()), "depends on the other samples",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_looks_at_other_samples_is_found_where_random_numbers_are_drawn(name):
    layer, reason = OTHERS[name]
    report = verify(pipe_of(linear(), layer, linear()), batch()[0], loss_fn=squares)
    assert report.pipe_ok
    assert not report.ok
    assert report["micro-batches"].where.startswith("layer 1 ")
    assert reason in report["micro-batches"].reason


def test_modules_that_take_time_first_are_named():
    x = torch.randn(8, 5, WIDTH)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8)
    report = verify(pipe_of(linear(), layer, linear()), x, loss_fn=torch.mean)
    assert "time in dimension 0 (self_attn: MultiheadAttention)" in report["micro-batches"].reason
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
    report = verify(pipe_of(linear(), layer, linear()), x, loss_fn=torch.mean)
    assert report.ok, str(report)
    assert report.uncompared == []


def test_layers_that_draw_always_are_said_not_to_be_compared():
    report = verify(pipe_of(linear(), Centred(always), linear()), batch()[0], loss_fn=squares)
    assert report.ok
    assert report.uncompared == ["layer 1 ('1': Centred)"]
    verdict = str(report).replace("\n", " ").partition("OK: ")[2]
    assert "Not known: whether micro-batches give what the mini-batch gives in layer 1" in verdict
