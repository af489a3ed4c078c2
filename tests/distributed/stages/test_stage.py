"""``syncpipe.distributed.stage`` on four ranks, beside the plain model."""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import pipelining
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from syncpipe import LayerSpec, NoChunk, Pipe, sequential
from syncpipe.commands.demo import resnet
from syncpipe.distributed import peers, stage
from syncpipe.distributed.schedules import SCHEDULES
from tests.distributed.processes import told
from tests.distributed.stages.models import data, expected, model, specs
from tests.distributed.test_gradients import differences

M = 8
BALANCES = {"one": [3, 3, 3, 3], "loop": [1, 2, 1, 2, 2, 1, 2, 1], "v": [1, 2, 1, 2, 2, 1, 2, 1]}


def test_without_a_process_group_or_a_pytorch_that_can_it_says_so(monkeypatch):
    with pytest.raises(ValueError, match="call init_process_group"):
        stage([torch.nn.ReLU()], [1])
    base, version = pipelining.stage._PipelineStageBase, re.escape(torch.__version__)
    monkeypatch.setattr(base, "get_local_bwd_output", lambda self, mb_index, more: None)
    with pytest.raises(RuntimeError, match=rf"{version}, where it takes .*'more'\]"):
        stage([torch.nn.ReLU()], [1])
    monkeypatch.delattr(base, "get_local_bwd_output")
    with pytest.raises(RuntimeError, match=f"{version}, where it is gone"):
        stage([torch.nn.ReLU()], [1])
    monkeypatch.delattr(base, "_get_grad_send_meta")
    with pytest.raises(RuntimeError, match=r"needs PyTorch 2\.13 or later"):
        stage([torch.nn.ReLU()], [1])


# --- refusals ------------------------------------------------------------------------------------


def _shares_a_weight() -> None:
    layers = nn.Sequential(*[nn.Linear(3, 3) for _ in range(10)])
    layers[4].weight = layers[2].weight  # of one stage
    mine = stage(layers, [1, 1, 3, 1, 1, 1, 1, 1], sample=torch.randn(2, 3))
    mine.schedule("interleaved_zero_bubble", chunks=4, loss_fn=F.mse_loss)


class _Objects(nn.Module):
    """Gives what cannot be sent."""

    def forward(self, x: Tensor) -> Any:
        return {"x": x, "thing": object()}


def refused() -> list[tuple[str, str]]:
    """What is expected of one rank at least, and what this one says."""
    rank = dist.get_rank()
    x, y = data()
    objects = [nn.Linear(3, 3), _Objects(), lambda given: given["x"], nn.Linear(3, 3)]
    constructors = [*specs()[:-1], lambda x: x]
    longer = [*specs(), *[nn.ReLU()] * (rank == 2)]

    def made(balance: Any = BALANCES["one"], layers: Any = None, **options: Any) -> Any:
        return stage(layers or model(), balance, **{"sample": x[:2], **options})

    def schedule(name: str = "1f1b", chunks: int = M, **options: Any) -> Any:
        return mine.schedule(name, chunks=chunks, **{"loss_fn": F.cross_entropy, **options})

    mine = made()

    def step(x: Tensor, y: Tensor) -> None:
        made().schedule("1f1b", chunks=M, loss_fn=F.cross_entropy).step(x, target=y)

    calls: dict[str, Callable[[], Any]] = {
        "ValueError: sample is missing: .*sample=x": lambda: made(sample=None),
        r"ValueError: balance=\[6, 6\] has 2 stages for 4 ranks": lambda: made([6, 6]),
        "ValueError: placement='w': must be 'loop' or 'v'": lambda: made(placement="w"),
        "4 stages for 4 ranks: give 8, two on each for placement='v'": lambda: made(placement="v"),
        r"TypeError: the value\['thing'\] from stage 1 .* on rank 1 is of type object": lambda: (
            made([1] * 4, objects, sample=x[:2].float())
        ),
        "ValueError: seed=-1": lambda: made(layers=constructors, seed=-1),
        r"processes differ in balances: rank 0 has \[2, 4, 3, 3\], rank 1 has": lambda: made(
            [3, 3, 3, 3] if rank else [2, 4, 3, 3]
        ),
        "ValueError: processes differ in layers: ": lambda: made("uniform", longer),
        "RuntimeError: rank 3 of the pipeline refused, so all do: .*nonsense": lambda: made(
            "nonsense" if rank == 3 else "uniform"
        ),
        "schedule 'zb_h1' is unknown between processes: use one of 'gpipe', '1f1b'": lambda: (
            schedule("zb_h1")
        ),
        r"'zbv' needs two stages on each rank in a V: stage\(": lambda: schedule("zbv"),
        "loss_fn=CrossEntropyLoss is a class": lambda: schedule(loss_fn=nn.CrossEntropyLoss),
        "processes differ in schedules: rank 0 has 1f1b, rank 2 has gpipe": lambda: schedule(
            "gpipe" if rank == 2 else "1f1b"
        ),
        "differ in chunks: rank 0 has 16, rank 1 has 8": lambda: schedule(chunks=M if rank else 16),
        "data_parallel must be a process group of this": lambda: schedule(data_parallel=3),
        "runs backward in halves, and '4.weight' is": _shares_a_weight,
        "the input has 12 samples, and chunks=8 micro-batches of 2 .* are 16": lambda: step(
            x[:12], y[:36]
        ),
        "the input has 9 samples, .*drop_last=True": lambda: step(x[:9], y[:27]),
        "the target has 15 samples, and chunks=8": lambda: step(x, y[:15]),
        r"of the input is int32\[2, 3\], and the sample .* int64\[2, 3\]": lambda: step(x.int(), y),
    }
    return [(pattern, told(call)) for pattern, call in calls.items()]


def test_what_cannot_be_is_refused_on_all_ranks_with_the_reason(four):
    for ranks in zip(*four.run(refused), strict=True):
        said = [found for _, found in ranks]
        assert any(re.search(ranks[0][0], each) for each in said), (ranks[0][0], said)
        for each in said:
            assert re.match(r"\w+Error: ", each), said


# --- steps ---------------------------------------------------------------------------------------


def trained(name: str) -> None:
    """Evaluation, two steps, whose gradients add up, and evaluation again.

    Outputs, losses and gradients are the plain model's.
    """
    kind, where = SCHEDULES[name]
    x, y = data()
    place = "v" if where == "v" else "loop"
    mine = stage(model(), BALANCES[where], sample=x[:2], placement=place)
    schedule = mine.schedule(name, chunks=M, loss_fn=F.cross_entropy)
    assert isinstance(schedule, getattr(pipelining, kind))
    assert len(mine.stages) == (1 if where == "one" else 2)
    plain, loss = expected()
    with torch.no_grad():
        wanted = torch.cat([plain(piece) for piece in x.chunk(M)])
    mine.eval()
    losses: list[Tensor] = []
    outputs = [schedule.eval(x), schedule.eval(x, target=y, losses=losses)]
    mine.train()
    outputs.append(schedule.step(x, target=y))
    schedule.step(data(1)[0], target=data(1)[1])
    mine.eval()
    outputs.append(schedule.eval(x))
    assert all(torch.equal(output, wanted) for output in outputs if output is not None)
    assert (outputs[0] is None) == (mine.last is None)
    assert not losses or sum(losses).allclose(loss)
    assert differences(mine, expected(steps=2)[0]) < 1e-6


@pytest.mark.parametrize("name", SCHEDULES)
def test_training_and_evaluation_by_each_schedule_are_the_plain_model_s(four, name):
    four.run(trained, name)


def announced() -> None:
    """A call writes into the store once, and asks nobody; only those of a tie add up gradients."""
    counts: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        return lambda *args, **options: counts.update([name]) or function(*args, **options)

    c10d = dist.distributed_c10d
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(peers, "PATIENCE", 600.0)  # nobody looks
        store = c10d._get_default_store()
        names = [name for name in dir(store) if not name.startswith("_") and name != "timeout"]
        counted = SimpleNamespace(**{k: counting(k, getattr(store, k)) for k in names})
        patched.setattr(c10d, "_get_default_store", lambda: counted)
        mine = stage(model(), BALANCES["one"], sample=data()[0][:2])
        schedule = mine.schedule("1f1b", chunks=M, loss_fn=F.cross_entropy)
        for name in ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "barrier"):
            patched.setattr(dist, name, counting(name, getattr(dist, name)))
        counts.clear()
        for _ in range(3):
            schedule.step(data()[0], target=data()[1])
    assert counts == {"set": 3, **({"all_reduce": 3} if mine.rank in (0, 3) else {})}


def batch_norm() -> None:
    """The demo's model: gradients, and running statistics that have seen each batch once."""
    torch.manual_seed(1)
    x, y = torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))
    torch.manual_seed(0)
    ours = resnet(torch.nn.BatchNorm2d)
    plain = copy.deepcopy(ours)
    mine = stage(ours, [2, 2, 2, 1], sample=x[:4])
    mine.schedule("1f1b", chunks=4, loss_fn=F.cross_entropy).step(x, target=y)
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        (F.cross_entropy(plain(a), b) / 4).backward()
    for name, parameter in mine.named_parameters():
        assert torch.equal(parameter.grad, plain.get_parameter(name).grad)
    for name, buffer in mine.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name))
    keys: list[Any] = [None] * 4
    dist.all_gather_object(keys, list(mine.state_dict()))
    assert list(chain(*keys)) == list(plain.state_dict())


def built() -> None:
    """Of specs only the own ones, with the values that one process gives them."""
    names: list[int] = []
    x, y = data()
    layers = specs()
    for k, spec in enumerate(layers):
        spec.typename = lambda kind=spec.typename, k=k: _counted(kind, k, names)
    mine = stage(layers, BALANCES["one"], sample=x[:2], seed=5)
    losses: list[Tensor] = []
    mine.schedule("1f1b", chunks=M, loss_fn=F.cross_entropy).step(x, target=y, losses=losses)
    pipe = Pipe(specs(), BALANCES["one"], chunks=M, devices=["cpu"] * 4, seed=5)
    loss = pipe.train_batch(x, y, loss_fn=F.cross_entropy)
    assert differences(mine, pipe) < 1e-6
    assert bool(losses) == (mine.last is not None)
    assert not losses or torch.allclose(sum(losses), loss)
    assert names == [3 * mine.rank + k for k in range(3)]


def _counted(kind: Any, k: int, names: list[int]) -> nn.Module:
    made = kind()
    if not any(parameter.is_meta for parameter in made.parameters()):
        names.append(k)
    return made


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.third, self.fourth = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: Tensor, *, shift: Tensor) -> dict[str, Tensor]:
        x = torch.relu(self.first(x)) * scale
        y = torch.relu(self.second(x)) + shift
        return {"out": self.fourth(torch.relu(self.third(y) + x)), "hidden": y}


def trees() -> None:
    """A model that was converted: several inputs, one of them whole, and outputs and targets."""
    torch.manual_seed(0)
    model = _Two()
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    x, scale, shift, y = torch.randn(8, 4), torch.rand(4), torch.randn(8, 4), torch.randn(8, 2)
    layers = sequential(model, x[:2], NoChunk(scale), shift=shift[:2])
    sample = {"x": x[:2], "scale": NoChunk(scale), "shift": shift[:2]}

    def loss_fn(output: Any, target: Any) -> Tensor:
        return F.mse_loss(output["out"], target["y"])

    mine = stage(layers, "uniform", sample=sample)
    schedule = mine.schedule("gpipe", chunks=4, loss_fn=loss_fn)
    output = schedule.step(x, NoChunk(scale), shift=shift, target={"y": y})
    for k in range(0, 8, 2):
        found = plain(x[k : k + 2], scale, shift=shift[k : k + 2])["out"]
        (F.mse_loss(found, y[k : k + 2]) / 4).backward()
    assert differences(mine, plain) < 1e-6
    assert {*mine.state_dict()} < {*plain.state_dict()}
    assert (output is None) == (mine.last is None)
    assert output is None or output["hidden"].shape == (8, 4)


def clipped() -> None:
    """Norms of gradients that are of another dtype in each stage, and one stage without any."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    mine = stage(linears(), [1] * 4, sample=torch.randn(2, 4))
    mine.stages[0].submod.to(dtypes[mine.rank])
    squares = 0.0
    for k, (layer, dtype) in enumerate(zip(linears()[:3], dtypes, strict=False)):
        for parameter in layer.to(dtype).parameters():
            squares += float(parameter.double().square().sum())
        if k == mine.rank:
            for own, value in zip(mine.parameters(), layer.parameters(), strict=True):
                own.grad = value.detach().clone()
    norm = mine.clip_grad_norm_(0.5)
    torch.testing.assert_close(float(norm), squares**0.5, rtol=1e-2, atol=0)
    for own in mine.parameters():
        assert mine.rank == 3 or torch.allclose(own.grad, own * (0.5 / norm).to(own), rtol=1e-2)
    clip = nn.utils.clip_grad_norm_
    with pytest.warns(
        UserWarning, match=r"its own norm.*mine\.clip_grad_norm_\(max_norm\)"
    ) as found:
        clip(mine.parameters(), 9.0)
    assert [warning.filename for warning in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip(mine.parameters(), 9.0)  # it is said once
        other = stage(linears(), [1] * 4, sample=torch.randn(2, 4))
        nn.utils.clip_grads_with_norm_(other.parameters(), 9.0, norm)  # one that is known
        clip(copy.deepcopy(other).parameters(), 9.0)


def draws() -> None:
    """Dropout, and weights of specs without a seed: those of a pipe, and generators stay alike."""
    x, y = torch.randn(16, 4), torch.randint(0, 4, (16,))
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Dropout, 0.5)] * 3
    layers += [LayerSpec(nn.Linear, 4, 4), lambda x: F.dropout(x, 0.2)]
    torch.manual_seed(3)
    mine = stage(layers, [2] * 4, sample=x[:2])
    own = mine.state_dict()
    rows: list[Any] = [None] * 4
    dist.all_gather_object(rows, own)
    pipe = Pipe(layers, [8], devices=["cpu"], chunks=M)
    pipe.load_state_dict({k: v for row in rows for k, v in row.items()})

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(output, 0.1), target)

    # What hooks draw, which may be more on one rank, is no draw of the step.
    next(mine.parameters()).register_post_accumulate_grad_hook(lambda p: torch.rand_like(p).sum())
    schedule = mine.schedule("1f1b", chunks=M, loss_fn=loss_fn)
    for step in range(2):
        mine.zero_grad()
        pipe.zero_grad()
        torch.manual_seed(step)
        schedule.step(x, target=y)
        after = torch.get_rng_state()
        torch.manual_seed(step)
        pipe.train_batch(x, y, loss_fn=loss_fn)
        assert torch.equal(after, torch.get_rng_state())
    for name, parameter in mine.named_parameters():
        assert torch.equal(parameter.grad, pipe.get_parameter(name).grad)


def copied() -> None:
    """An average of the weights, and a copy, which has no schedules."""
    mine = stage(linears(), [1] * 4, sample=torch.randn(2, 4))
    average = AveragedModel(mine, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    average.update_parameters(mine)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.add_(1.0)
    average.update_parameters(mine)
    moved = copy.deepcopy(mine)
    for own, mean, other in zip(
        mine.parameters(), average.parameters(), moved.parameters(), strict=True
    ):
        torch.testing.assert_close(own - mean, torch.full_like(own, 0.75))
        assert torch.equal(own, other)
        assert own is not other
    mine.load_state_dict(average.module.state_dict())
    with pytest.raises(RuntimeError, match=r"schedule\(\) of a copy of stages"):
        moved.schedule("gpipe", chunks=2)


def hooked() -> None:
    """An optimizer in hooks makes one step, by the gradients of the mini-batch."""
    plain, x, y = linears(), torch.randn(16, 4), torch.randint(0, 4, (16,))
    for each in plain:
        each.unused = nn.Parameter(torch.ones(3))
    mine = stage(copy.deepcopy(plain), [1] * 4, sample=x[:2])
    for parameter in mine.parameters():
        parameter.grad = torch.zeros_like(parameter)
        step = torch.optim.SGD([parameter], 0.5, weight_decay=0.1).step
        parameter.register_post_accumulate_grad_hook(lambda _, step=step: step())
    mine.schedule("1f1b", chunks=8, loss_fn=F.cross_entropy).step(x, target=y)
    F.cross_entropy(plain(x), y).backward()
    torch.optim.SGD(plain.parameters(), 0.5, weight_decay=0.1).step()
    for name, parameter in mine.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name))
        assert parameter._post_accumulate_grad_hooks


def warned() -> None:
    """Of a masked mean of one's own, on the rank that has the outputs; metrics are there."""
    x, y = torch.randn(16, 4), torch.randint(1, 4, (16,))
    y[:7:2] = 0

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        kept = target != 0
        lost = F.cross_entropy(output, target, reduction="none")
        return (lost * kept).sum() / kept.sum(), {"output": float(output.detach().mean())}

    mine = stage(linears(), [1] * 4, sample=x[:2])
    schedule = mine.schedule("1f1b", chunks=8, loss_fn=loss_fn)
    quiet = mine.schedule("1f1b", chunks=8, loss_fn=loss_fn, verify=False)
    for each, wanted in (schedule, mine.last is not None), (quiet, False):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            output = each.step(x, target=y)
        said = [str(warning.message) for warning in found if "loss_fn" in str(warning.message)]
        assert bool(said) == wanted, said
        assert (each.metrics is None) == (mine.last is None)
        if output is not None:
            torch.testing.assert_close(each.metrics["output"], float(output.mean()))


@pytest.mark.parametrize(
    "act", [announced, batch_norm, built, trees, clipped, draws, copied, hooked, warned]
)
def test_models_of_all_kinds(four, act):
    four.run(act)


# --- checkpoints ---------------------------------------------------------------------------------

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def optimized(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has made a step with the parameters as their gradients."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    for parameter in module.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def loaded(module: nn.Module, folder: Path, **options: Any) -> bool:
    """Whether the state of an optimizer that was saved is the module's, by name."""
    optimizer = torch.optim.AdamW(module.parameters())
    state = {"optim": get_optimizer_state_dict(module, optimizer, options=BY_NAME)}
    dcp.load(state, checkpoint_id=folder, **options)
    set_optimizer_state_dict(module, optimizer, state["optim"], options=BY_NAME)
    return all(torch.allclose(optimizer.state[p]["exp_avg"], 0.1 * p) for p in module.parameters())


def checkpoints(where: str) -> None:
    """From a pipe in one process to four stages, to 2 x 2 with sharded ones, and out again."""
    folder = Path(where)
    x, _ = data()
    torch.manual_seed(3)  # other values than those to be loaded
    four = stage(specs(), BALANCES["one"], sample=x[:2])
    dcp.load({"model": four.state_dict()}, checkpoint_id=folder / "pipe")
    dcp.save({"model": four.state_dict()}, checkpoint_id=folder / "four")
    untied = stage(linears(), [1] * 4, sample=torch.randn(2, 4))
    assert loaded(untied, folder / "pipe's optimizer")
    states = get_optimizer_state_dict(untied, optimized(untied), options=BY_NAME)
    dcp.save({"optim": states}, checkpoint_id=folder / "four's optimizer")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    two = stage(specs(), [5, 7], sample=x[:2], group=mesh["pp"])
    for each in two.stages:
        fully_shard(each.submod, mesh=mesh["dp"])
    state = two.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder / "four")
    two.load_state_dict(state)
    dcp.save({"model": two.state_dict()}, checkpoint_id=folder / "two")
    wanted = torch.load(folder / "plain.pt")
    whole = {name: value.full_tensor() for name, value in two.state_dict().items()}
    again = stage(specs(), BALANCES["one"], sample=x[:2])
    again.load_state_dict(wanted)  # that of the whole model
    for found in four.state_dict(), whole, again.state_dict():
        assert found
        assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_checkpoints_move_between_a_pipe_and_processes_of_any_shape_and_the_plain_model(
    four, tmp_path
):
    pipe = Pipe(model(), [3, 3, 3, 3], devices=["cpu"] * 4)
    torch.save(pipe.state_dict(), tmp_path / "plain.pt")
    dcp.save({"model": pipe.state_dict()}, checkpoint_id=tmp_path / "pipe", no_dist=True)
    untied = Pipe(linears(), [1] * 4, devices=["cpu"] * 4)
    states = get_optimizer_state_dict(untied, optimized(untied), options=BY_NAME)
    dcp.save({"optim": states}, checkpoint_id=tmp_path / "pipe's optimizer", no_dist=True)
    four.run(checkpoints, str(tmp_path))
    untied = Pipe(linears(), [1] * 4, devices=["cpu"] * 4)
    assert loaded(untied, tmp_path / "four's optimizer", no_dist=True)
    for name in ("four", "two"):
        plain = torch.nn.Sequential(*[spec.build() for spec in specs()])
        plain[-1].weight = plain[0].words.weight
        dcp.load({"model": plain.state_dict()}, checkpoint_id=tmp_path / name, no_dist=True)
        wanted = pipe.state_dict()
        assert all(torch.equal(value, wanted[key]) for key, value in plain.state_dict().items())
