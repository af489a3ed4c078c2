"""What each of the four ranks of ``test_stage.py`` does; what it returns is looked at there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from syncpipe import NoChunk, sequential
from syncpipe.commands.demo import resnet
from syncpipe.distributed import stage
from tests.distributed.stages.models import data, difference, expected, model, specs

M = 8
BALANCES = {"one": [3, 3, 3, 3], "loop": [1, 2, 1, 2, 2, 1, 2, 1], "v": [1, 2, 1, 2, 2, 1, 2, 1]}
RUNS = {
    "gpipe": "one", "1f1b": "one", "interleaved_1f1b": "loop", "looped_bfs": "loop",
    "interleaved_zero_bubble": "loop", "zbv": "v", "dualpipev": "v",
}  # fmt: skip


def everything(rank: int, folder: Path) -> dict[str, Any]:
    """In this order, for refusals must leave the group as it was."""
    return {
        "refused": refused(rank),
        "schedules": schedules(),
        "batch norm": batch_norm(),
        "built": built(),
        "evaluated": {name: evaluated(name, placement) for name, placement in RUNS.items()},
        "trees": trees(),
        "checkpoints": checkpoints(folder),
        "disagreed": disagreed(rank),
    }


def raised(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(rank: int) -> dict[str, str]:
    x, y = data()
    made = partial(stage, model(), BALANCES["one"])
    found = {
        "no sample": raised(made),
        "balance": raised(lambda: stage(model(), [6, 6], sample=x[:2])),
        "balance by time": raised(lambda: stage(model(), "time", sample=x[:2])),
        "placement": raised(lambda: made(sample=x[:2], placement="w")),
        "v": raised(lambda: made(sample=x[:2], placement="v")),
        "object": raised(lambda: stage(_Objects.layers(), [1] * 4, sample=x[:2].float())),
        "constructor": raised(
            lambda: stage([*specs()[:-1], lambda x: x], BALANCES["one"], sample=x[:2], seed=-1)
        ),
    }
    mine = made(sample=x[:2])
    schedule = partial(mine.schedule, chunks=M, loss_fn=F.cross_entropy)
    found |= {
        "name": raised(lambda: schedule("zb_h1")),
        "v schedule": raised(lambda: schedule("zbv")),
        "scale_grads": raised(lambda: schedule("gpipe", scale_grads=False)),
        "loss": raised(lambda: schedule("gpipe", loss_fn=nn.CrossEntropyLoss)),
        "schedules": raised(lambda: schedule("gpipe" if rank == 2 else "1f1b")),
        "chunks": raised(lambda: schedule("1f1b", chunks=M if rank else 16)),
        "group": raised(lambda: schedule("1f1b", data_parallel=3)),
        "forward": raised(lambda: mine(x)),
    }
    ready = schedule("1f1b")
    found |= {
        "batch": raised(lambda: ready.step(x[:12], target=y[:36])),
        "no multiple": raised(lambda: ready.step(x[:9], target=y[:27])),
        "target": raised(lambda: ready.step(x, target=y[:15])),
        "no grad": raised(torch.no_grad()(lambda: ready.step(x, target=y))),
        "then": raised(lambda: ready.step(x, target=y)),
        "shared": raised(_shares_a_weight),
    }
    plain, _ = expected(model(), M)
    found["then right"] = str(difference(mine, plain) < 1e-6)
    return found


def _shares_a_weight() -> None:
    layers = nn.Sequential(*[nn.Linear(3, 3) for _ in range(10)])
    layers[4].weight = layers[2].weight  # of one stage
    mine = stage(layers, [1, 1, 3, 1, 1, 1, 1, 1], sample=torch.randn(2, 3))
    mine.schedule("interleaved_zero_bubble", chunks=4, loss_fn=F.mse_loss)


class _Objects(nn.Module):
    """Gives what cannot be sent."""

    def forward(self, x: Tensor) -> Any:
        return {"x": x, "thing": object()}

    @staticmethod
    def layers() -> list[Any]:
        return [nn.Linear(3, 3), _Objects(), lambda given: given["x"], nn.Linear(3, 3)]


def schedules() -> dict[str, Any]:
    found = {}
    for name, placement in RUNS.items():
        x, y = data()
        mine = stage(
            model(),
            BALANCES[placement],
            sample=x[:2],
            placement="v" if placement == "v" else "loop",
        )
        try:
            schedule = mine.schedule(name, chunks=M, loss_fn=F.cross_entropy)
        except ValueError as error:  # an old PyTorch
            found[name] = (0.0, type(None), len(mine.stages)) if "gloo" in str(error) else error
            continue
        for step in range(2):  # gradients add up
            x, y = data(step)
            schedule.step(x, target=y)
        plain, _ = expected(model(), M, steps=2)
        found[name] = difference(mine, plain), type(schedule).__mro__[2], len(mine.stages)
    return found


def batch_norm() -> tuple[bool, bool, list[str]]:
    """The demo's model: gradients, and running statistics that have seen each batch once."""
    torch.manual_seed(1)
    x, y = torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))
    torch.manual_seed(0)
    ours = resnet(torch.nn.BatchNorm2d)
    torch.manual_seed(0)
    plain = resnet(torch.nn.BatchNorm2d)
    mine = stage(ours, [2, 2, 2, 1], sample=x[:4])
    mine.schedule("1f1b", chunks=4, loss_fn=F.cross_entropy).step(x, target=y)
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        (F.cross_entropy(plain(a), b) / 4).backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    buffers = dict(plain.named_buffers())
    return (
        all(torch.equal(p.grad, gradients[name]) for name, p in mine.named_parameters()),
        all(torch.equal(b, buffers[name]) for name, b in mine.named_buffers()),
        list(mine.state_dict()),
    )


def built() -> tuple[list[str], float, Tensor | None]:
    """Of specs only the own ones, with the values that one process gives them."""
    names: list[str] = []
    x, y = data()
    layers = specs()
    for k, spec in enumerate(layers):
        real = spec.typename
        spec.typename = _counted(real, k, names)
    mine = stage(layers, BALANCES["one"], sample=x[:2], seed=5)
    losses: list[Tensor] = []
    mine.schedule("1f1b", chunks=M, loss_fn=F.cross_entropy).step(x, target=y, losses=losses)
    from syncpipe import Pipe

    pipe = Pipe(specs(), BALANCES["one"], chunks=M, devices=["cpu"] * 4, seed=5)
    loss = pipe.train_batch(x, y, loss_fn=F.cross_entropy)
    total = None if not losses else torch.stack(losses).sum() - loss
    return names, difference(mine, pipe), total


def _counted(kind: Any, k: int, names: list[str]) -> Any:
    def make() -> nn.Module:
        made = kind()
        if not any(parameter.is_meta for parameter in made.parameters()):
            names.append(f"{k}")
        return made

    return make


def evaluated(name: str, placement: str) -> tuple[bool, bool, float]:
    """Evaluation first, then training, and evaluation again: outputs of the plain model."""
    x, y = data()
    layers = model()
    plain = model()
    where = "v" if placement == "v" else "loop"
    mine = stage(layers, BALANCES[placement], sample=x[:2], placement=where)
    try:
        schedule = mine.schedule(name, chunks=M, loss_fn=F.cross_entropy)
    except ValueError as error:  # an old PyTorch
        return "gloo" in str(error), True, 0.0
    mine.eval()
    losses: list[Tensor] = []
    before = schedule.eval(x), schedule.eval(x, target=y, losses=losses)
    mine.train()
    output = schedule.step(x, target=y)
    mine.eval()
    after = schedule.eval(x)
    with torch.no_grad():
        wanted = torch.cat([plain(piece) for piece in x.chunk(M)])
    found = [value for value in (*before, output, after) if value is not None]
    alike = all(torch.equal(value, wanted) for value in found)
    plain, loss = expected(model(), M)
    return alike, not losses or bool(sum(losses).allclose(loss)), difference(mine, plain)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.third, self.fourth = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: Tensor, *, shift: Tensor) -> dict[str, Tensor]:
        x = torch.relu(self.first(x)) * scale
        y = torch.relu(self.second(x)) + shift
        return {"out": self.fourth(torch.relu(self.third(y) + x)), "hidden": y}


def trees() -> tuple[float, list[str], Any]:
    """A model that was converted: several inputs, one of them whole, and outputs and targets."""
    torch.manual_seed(0)
    model = _Two()
    torch.manual_seed(1)
    x, scale, shift, y = torch.randn(8, 4), torch.rand(4), torch.randn(8, 4), torch.randn(8, 2)
    layers = sequential(model, x[:2], NoChunk(scale), shift=shift[:2])
    sample = {"x": x[:2], "scale": NoChunk(scale), "shift": shift[:2]}

    def loss_fn(output: Any, target: Any) -> Tensor:
        return F.mse_loss(output["out"], target["y"])

    mine = stage(layers, "uniform", sample=sample)
    schedule = mine.schedule("gpipe", chunks=4, loss_fn=loss_fn)
    output = schedule.step(x, NoChunk(scale), shift=shift, target={"y": y})
    torch.manual_seed(0)
    plain = _Two()
    for k in range(0, 8, 2):
        found = plain(x[k : k + 2], scale, shift=shift[k : k + 2])["out"]
        (F.mse_loss(found, y[k : k + 2]) / 4).backward()
    keys = sorted(mine.state_dict())
    return difference(mine, plain), keys, None if output is None else output["hidden"].shape


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


def checkpoints(folder: Path) -> dict[str, bool]:
    """From a pipe in one process to four stages, to 2 x 2 with sharded ones, and out again."""
    x, _ = data()
    torch.manual_seed(3)  # other values than those to be loaded
    four = stage(specs(), BALANCES["one"], sample=x[:2])
    dcp.load({"model": four.state_dict()}, checkpoint_id=folder / "pipe")
    dcp.save({"model": four.state_dict()}, checkpoint_id=folder / "four")
    untied = stage(linears(), [1] * 4, sample=torch.randn(2, 4))
    optimizer = loaded(untied, folder / "pipe's optimizer")
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
    return {
        "optimizer": optimizer,
        "four": _same(four.state_dict(), wanted),
        "two": _same(whole, wanted),
        "again": _same(again.state_dict(), wanted),
    }


def _same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return bool(found) and all(torch.equal(found[name], wanted[name]) for name in found)


def disagreed(rank: int) -> dict[str, str]:
    """Ranks that were told different things."""
    x, _ = data()
    other = [3, 3, 3, 3] if rank else [2, 4, 3, 3]
    return {
        "balance": raised(lambda: stage(model(), other, sample=x[:2])),
        "layers": raised(
            lambda: stage([*specs(), *[nn.ReLU()] * (rank == 2)], "uniform", sample=x[:2])
        ),
        "one rank": raised(lambda: stage(model(), "nonsense" if rank == 3 else "uniform")),
    }
