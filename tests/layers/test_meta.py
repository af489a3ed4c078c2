"""Models that were built on meta get memory and values stage by stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.counted import HostBytes
from syncpipe import LayerSpec, Pipe, plan
from syncpipe.balance import balance_by_time
from tests.support.models import assert_same_tree, in_turn, step

WIDTH = 8


class Mask(nn.Module):
    """A buffer that nothing resets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


class Half(Mask):
    """Resets its weight, and forgets some of its buffers."""

    def __init__(self, sets: Callable[[Any], Any] = lambda half: None, **buffers: Any) -> None:
        super().__init__()
        self.weight, self.sets = nn.Parameter(torch.empty(WIDTH)), sets
        for name, dtype in buffers.items():
            self.register_buffer(name, torch.ones(WIDTH, dtype=dtype))

    def reset_parameters(self) -> None:
        self.weight.data.fill_(2.0)
        self.sets(self)


class Outer(nn.Module):
    """Its reset comes after those of its children, as in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.inner.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Recurrent(nn.Module):
    """Keeps its parameters in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def layers() -> list[nn.Module]:
    return [
        Outer(),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
        Recurrent(),
    ]


def meta(make: Callable[[], Any] = lambda: nn.Sequential(*layers())) -> Any:
    with torch.device("meta"):
        return make()


def states(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("balance", [[5], [1, 2, 2], "parameters"])
def test_values_are_those_of_the_model_built_with_values(balance: Any) -> None:
    torch.manual_seed(4)
    plain = nn.Sequential(*layers())
    torch.manual_seed(4)
    pipe = Pipe(meta(), balance, devices=["cpu:0", "cpu:1", "cpu:0"], chunks=2)
    assert_same_tree(states(pipe), states(plain), "values")
    x = torch.randn(4, WIDTH)
    assert_same_tree(vars(step(pipe, pipe, x)), vars(step(in_turn(plain, 2), plain, x)), "step")


def test_the_layers_keep_their_identity_and_their_parameters_what_they_say() -> None:
    model = meta()
    model[2].weight.requires_grad_(False)
    model[2].weight.mine = "yes"
    first = list(model)
    pipe = Pipe(model, [2, 3])
    assert list(pipe) == first
    assert isinstance(pipe[2].weight, nn.Parameter)
    assert not pipe[2].weight.requires_grad
    assert pipe[2].weight.mine == "yes"


def test_weights_depend_on_seed_and_layer_alone() -> None:
    made = [Pipe(meta(), balance, seed=3) for balance in ([5], [1, 4])]
    assert_same_tree(states(made[0]), states(made[1]), "values")
    with_specs = Pipe([*meta()[:2], LayerSpec(nn.Linear, WIDTH, WIDTH)], [1, 2], seed=3)
    assert_same_tree(states(with_specs[2]), states(made[0][2]), "a spec and a layer on meta")
    other = Pipe(meta(), [1, 4], seed=5)
    other.load_state_dict(made[0].state_dict())
    x = torch.randn(4, WIDTH)
    assert torch.equal(copy.deepcopy(made[0]).eval()(x), other.eval()(x))


def test_on_a_stage_on_meta_nothing_is_materialised_before_it_has_a_device() -> None:
    with HostBytes() as host:
        pipe = Pipe(meta(), [2, 3], devices=["meta", "meta"])
        assert host.most == 0
    assert all(p.is_meta for p in pipe.parameters())
    assert pipe(torch.randn(4, WIDTH, device="meta")).shape == (4, WIDTH)
    pipe.devices = ["cpu:0", "cpu:1"]
    assert pipe(torch.randn(4, WIDTH)).isfinite().all()


def test_init_fn_comes_after_reset_parameters_children_first() -> None:
    seen: list[str] = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        if isinstance(module, nn.Linear):
            assert not module.weight.isnan().any()
            nn.init.constant_(module.bias, 7.0)
        if isinstance(module, Mask):
            module.mask = torch.full((WIDTH,), 3.0)  # another tensor

    pipe = Pipe(meta(lambda: nn.Sequential(Outer(), Mask(), nn.ReLU())), [1, 2], init_fn=init)
    assert seen == ["Linear", "Outer", "Mask"]
    assert (pipe[0].inner.bias == 7).all()
    assert (pipe[1].mask == 3).all()


def test_what_has_values_is_left_alone() -> None:
    given, norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
    norm.running_mean.fill_(5.0)
    before, linear = given.weight.clone(), lambda: nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(given, meta(linear), nn.Sequential(norm, meta(linear)))
    pipe = Pipe(model, [1, 2], init_fn=lambda module: nn.init.zeros_(module.weight))
    assert torch.equal(pipe[0].weight, before)
    assert (pipe[1].weight == 0).all()
    assert (pipe[2][0].running_mean == 5).all()
    assert (pipe[2][0].weight == 1).all()
    assert (pipe[2][1].weight == 0).all()


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    return model


def test_a_tied_weight_stays_one_with_the_values_of_the_first() -> None:
    one, two = (Pipe(meta(tied), balance, seed=1, chunks=2) for balance in ([3], [1, 2]))
    assert two[2].weight is two[0].weight
    assert one[2].weight is one[0].weight
    alone = Pipe(meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH))), [1], seed=1)
    assert torch.equal(one[0].weight, alone[0].weight)
    assert_same_tree(states(two), states(one), "values")
    x = torch.randn(4, WIDTH)
    assert_same_tree(vars(step(two, two, x)), vars(step(one, one, x)), "step")
    pipe = Pipe(meta(lambda: nn.Sequential(tied())), [1])
    assert pipe[0][0].weight is pipe[0][2].weight
    assert not pipe[0][0].weight.is_meta


def partly(half: Any) -> None:
    half.mask[1:] = 1.0


def given_in_part() -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    linear.bias = nn.Parameter(torch.ones(WIDTH, device="cpu"))
    return linear


CANNOT: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "no reset": (Mask, None, r"Mask has 'mask' on meta, without values, and nothing sets"),
    "inside": (lambda: nn.Sequential(nn.ReLU(), Mask()), None, r"Mask at '1' has 'mask' on meta"),
    "half": (Half, None, r"Half has 'mask' .*nothing sets all of it"),
    "partly": (lambda: Half(partly), None, r"Half has 'mask' .*nothing sets all of it"),
    "numbers": (lambda: Half(lambda half: half.mask.fill_(1.0), table=torch.int64), None,
                r"Half has 'table'"),
    "flags": (lambda: Half(lambda half: half.mask.fill_(1.0), table=torch.bool), None,
              r"Half has 'table'"),
    "init_fn": (Mask, lambda module: None, r"Mask has 'mask' on meta.*nothing sets"),
    "given in part": (given_in_part, None, r"Linear has 'weight' on meta.*where all of them are"),
}  # fmt: skip


@pytest.mark.parametrize("what", CANNOT)
def test_what_gets_no_value_is_named_and_the_model_is_as_it_was(what: str) -> None:
    make, init_fn, message = CANNOT[what]
    model = meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), nn.Linear(WIDTH, WIDTH)))
    before = dict(model.state_dict(keep_vars=True))
    with pytest.raises(ValueError, match=message) as caught:
        Pipe(model, [2, 1], init_fn=init_fn)
    assert "init_fn=" in str(caught.value)
    assert "layer 1 (" in "".join(caught.value.__notes__)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is value for name, value in before.items())


def test_a_reset_that_raises_leaves_the_model_as_it_was() -> None:
    class Raises(nn.Linear):
        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                raise KeyError("mine")

    model = meta(lambda: nn.Sequential(nn.Linear(3, 3), Raises(3, 3)))
    with pytest.raises(KeyError, match="mine") as caught:
        Pipe(model, [1, 1])
    assert caught.value.__notes__ == ["while initialising layer 1 (Raises) on cpu:1"]
    assert all(p.is_meta for p in model.parameters())


def test_time_is_measured_on_a_real_device_layer_by_layer() -> None:
    model, x = meta(lambda: nn.Sequential(*layers(), Mask())), torch.randn(4, WIDTH)
    assert sum(balance_by_time(2, model, x, timeout=0.0, device="cpu")) == 6
    made = plan(model, x, devices=["cpu:0", "cpu:1"], batch_size=4, memory="1GB", timeout=0.0)
    assert sum(made.balance) == 6
    assert all(p.is_meta for p in model.parameters())
