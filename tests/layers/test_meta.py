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

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


class Half(Mask):
    """Resets its weight, and forgets its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.weight.data.fill_(2.0)


class Partly(Half):
    """Sets a part of its buffer."""

    def reset_parameters(self) -> None:
        self.weight.data.fill_(2.0)
        self.mask[1:] = 1.0


class Typed(Half):
    """Forgets a buffer of another kind."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH, dtype=dtype))

    def reset_parameters(self) -> None:
        self.weight.data.fill_(2.0)
        self.mask.fill_(1.0)


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


def layers() -> list[nn.Module]:
    return [
        Outer(),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    ]


def meta(make: Callable[[], Any] = lambda: nn.Sequential(*layers())) -> Any:
    with torch.device("meta"):
        return make()


def states(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("balance", [[4], [1, 2, 1], "parameters"])
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
    pipe = Pipe(model, [2, 2])
    assert list(pipe) == first
    assert isinstance(pipe[2].weight, nn.Parameter)
    assert not pipe[2].weight.requires_grad
    assert pipe[2].weight.mine == "yes"


def test_weights_depend_on_seed_and_layer_alone() -> None:
    made = [Pipe(meta(), balance, seed=3) for balance in ([4], [1, 3])]
    assert_same_tree(states(made[0]), states(made[1]), "values")
    with_specs = Pipe([*meta()[:2], LayerSpec(nn.Linear, WIDTH, WIDTH)], [1, 2], seed=3)
    assert_same_tree(states(with_specs[2]), states(made[0][2]), "a spec and a layer on meta")


def test_on_a_stage_on_meta_nothing_is_materialised() -> None:
    with HostBytes() as host:
        pipe = Pipe(meta(), [2, 2], devices=["meta", "meta"])
        assert host.most == 0
    assert all(p.is_meta for p in pipe.parameters())
    assert pipe(torch.randn(4, WIDTH, device="meta")).shape == (4, WIDTH)


def test_devices_that_are_set_materialise_what_was_on_meta() -> None:
    pipe = Pipe(meta(), [2, 2], devices=["meta", "meta"])
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
            module.mask.fill_(3.0)

    pipe = Pipe(meta(lambda: nn.Sequential(Outer(), Mask(), nn.ReLU())), [1, 2], init_fn=init)
    assert seen == ["Linear", "Outer", "Mask"]
    assert (pipe[0].inner.bias == 7).all()
    assert (pipe[1].mask == 3).all()


def test_layers_with_values_are_left_alone() -> None:
    given = nn.Linear(WIDTH, WIDTH)
    before = given.weight.clone()
    model = nn.Sequential(given, meta(lambda: nn.Linear(WIDTH, WIDTH)))
    pipe = Pipe(model, [1, 1], init_fn=lambda module: nn.init.zeros_(module.weight))
    assert torch.equal(pipe[0].weight, before)
    assert (pipe[1].weight == 0).all()


class Recurrent(nn.Module):
    """Keeps its parameters in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def test_recurrent_layers_compute_with_their_new_parameters() -> None:
    torch.manual_seed(1)
    plain, x = Recurrent(), torch.randn(4, WIDTH)
    torch.manual_seed(1)
    pipe = Pipe(meta(lambda: nn.Sequential(nn.ReLU(), Recurrent())), [1, 1])
    assert torch.equal(pipe(x), plain(x.relu()))
    pipe(x).sum().backward()
    assert all(p.grad is not None for p in pipe.parameters())


def test_modules_with_values_beside_others_on_meta_are_left_alone() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    norm.running_mean.fill_(5.0)
    layer = nn.Sequential(norm, meta(lambda: nn.Linear(WIDTH, WIDTH)))
    pipe = Pipe(nn.Sequential(layer), [1], init_fn=lambda module: nn.init.zeros_(module.weight))
    assert (pipe[0][0].running_mean == 5).all()
    assert (pipe[0][0].weight == 1).all()
    assert (pipe[0][1].weight == 0).all()


def test_a_weight_in_two_layers_stays_one_with_the_values_of_the_first() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        model[2].weight = model[0].weight
        return model

    pipe = Pipe(meta(tied), [3], seed=1)
    assert pipe[2].weight is pipe[0].weight
    alone = Pipe(meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH))), [1], seed=1)
    assert torch.equal(pipe[0].weight, alone[0].weight)


def test_a_weight_in_two_modules_of_a_layer_stays_one() -> None:
    def tied() -> nn.Sequential:
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        layer[1].weight = layer[0].weight
        return nn.Sequential(layer)

    pipe = Pipe(meta(tied), [1])
    assert pipe[0][0].weight is pipe[0][1].weight
    assert not pipe[0][0].weight.is_meta


CANNOT: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "no reset": (Mask, None, r"Mask has 'mask' on meta, without values, and nothing sets"),
    "inside": (lambda: nn.Sequential(nn.ReLU(), Mask()), None, r"Mask at '1' has 'mask' on meta"),
    "half": (Half, None, r"Half has 'mask' .*nothing sets all of it"),
    "init_fn": (
        Mask,
        lambda module: None,
        r"Mask has 'mask' on meta.*nothing sets",
    ),
    "both": (
        Half,
        lambda module: None,
        r"Half has 'mask' on meta.*nothing sets",
    ),
}


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


def test_a_module_with_values_in_part_is_refused() -> None:
    linear = meta(lambda: nn.Linear(WIDTH, WIDTH))
    linear.bias = nn.Parameter(torch.ones(WIDTH))
    with pytest.raises(
        ValueError, match=r"Linear has 'weight' on meta.*where all of them are on meta"
    ):
        Pipe(nn.Sequential(linear), [1])


def test_init_fn_may_replace_a_tensor() -> None:
    def init(module: nn.Module) -> None:
        module.mask = torch.full((WIDTH,), 4.0)

    pipe = Pipe(meta(lambda: nn.Sequential(Mask())), [1], init_fn=init)
    assert (pipe[0].mask == 4).all()


def test_time_is_measured_on_a_real_device_layer_by_layer() -> None:
    model, x = meta(lambda: nn.Sequential(*layers(), Mask())), torch.randn(4, WIDTH)
    assert sum(balance_by_time(2, model, x, timeout=0.0, device="cpu")) == 5
    made = plan(model, x, devices=["cpu:0", "cpu:1"], batch_size=4, memory="1GB", timeout=0.0)
    assert sum(made.balance) == 5
    assert all(p.is_meta for p in model.parameters())


def test_copies_and_checkpoints_of_what_was_materialised() -> None:
    pipe = Pipe(meta(), [2, 2], seed=2)
    other = Pipe(meta(), [1, 3], seed=5)
    other.load_state_dict(pipe.state_dict())
    x = torch.randn(4, WIDTH)
    assert torch.equal(copy.deepcopy(pipe).eval()(x), other.eval()(x))


def test_a_weight_may_be_tied_across_stages() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        model[2].weight = model[0].weight
        return model

    one, two = (Pipe(meta(tied), balance, seed=1, chunks=2) for balance in ([3], [1, 2]))
    assert two[2].weight is two[0].weight
    assert_same_tree(states(two), states(one), "values")
    x = torch.randn(4, WIDTH)
    assert_same_tree(vars(step(two, two, x)), vars(step(one, one, x)), "step")
