"""Names, checkpoints and optimizers are those of the model, in pipes of any balance."""

from __future__ import annotations

import builtins
import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe, sequential
from tests.layers.conversion.models import Dense, ResNet, Transformer, tokens


def both(sizes: int = 2) -> tuple[nn.Module, Pipe]:
    model = Transformer()
    layers = sequential(copy.deepcopy(model), *tokens())
    balance = [4] * (sizes - 1) + [len(layers) - 4 * (sizes - 1)]
    return model, Pipe(layers, balance, devices=[f"cpu:{j}" for j in range(sizes)])


def test_names_are_the_models_in_its_order():
    model, pipe = both()
    for names in ("named_parameters", "named_buffers"):
        ours = [name for name, _ in getattr(pipe, names)()]
        theirs = [name for name, _ in getattr(model, names)()]
        assert ours == theirs
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert {name for name, _ in model.named_modules() if "." in name} <= {
        name for name, _ in pipe.named_modules()
    }


@pytest.mark.parametrize("sizes", [1, 2, 3])
def test_checkpoints_move_between_model_and_pipes(sizes):
    model, pipe = both(sizes)
    _, other = both(4 - sizes)
    other.load_state_dict(pipe.state_dict())
    model.load_state_dict(other.state_dict())
    ids, mask = tokens()
    assert torch.equal(model(ids, mask).logits, pipe(ids, mask).logits)
    changed = {name: torch.rand_like(value) for name, value in model.state_dict().items()}
    assert str(pipe.load_state_dict(changed)) == "<All keys matched successfully>"
    model.load_state_dict(changed)
    assert torch.equal(model(ids, mask).logits, pipe(ids, mask).logits)


def test_in_another_module_names_have_its_prefix_only():
    model, pipe = both()
    around, plain = nn.ModuleDict({"net": pipe}), nn.ModuleDict({"net": model})
    assert around.state_dict().keys() == plain.state_dict().keys()
    around.load_state_dict(plain.state_dict())
    ours = {name for name, _ in around.named_parameters("m")}
    assert ours == {name for name, _ in plain.named_parameters("m")}


def test_what_does_not_fit_is_said_by_the_models_names():
    model, pipe = both()
    state = model.state_dict()
    del state["h.0.norm.weight"]
    state["h.9.norm.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r'Missing.*"h\.0\.norm\.weight"') as caught:
        pipe.load_state_dict(state)
    assert '"h.9.norm.weight"' in str(caught.value)
    found = pipe.load_state_dict(state, strict=False)
    assert found.missing_keys == ["h.0.norm.weight"]
    assert found.unexpected_keys == ["h.9.norm.weight"]
    with pytest.raises(RuntimeError, match=r"size mismatch for scale:"):
        pipe.load_state_dict({**model.state_dict(), "scale": torch.zeros(1)})


def test_assigned_tensors_go_to_the_devices_of_their_stages():
    model, pipe = both()
    pipe.load_state_dict(model.state_dict(), assign=True)
    ids, mask = tokens()
    assert torch.equal(model(ids, mask).logits, pipe(ids, mask).logits)


def test_optimizers_of_the_model_go_on_with_the_pipe():
    model, pipe = both()
    before = torch.optim.Adam(model.parameters())
    model(*tokens()).logits.sum().backward()
    before.step()
    after = torch.optim.Adam(pipe.parameters())
    after.load_state_dict(before.state_dict())
    for p, q in zip(model.parameters(), pipe.parameters(), strict=True):
        assert p.shape == q.shape
        assert before.state[p].keys() == after.state[q].keys()


def test_modules_are_the_very_objects_and_their_hooks_run():
    model = ResNet()
    calls = []
    model.blocks[1].first.register_forward_hook(lambda *_: calls.append("before"))
    layers = sequential(model, x := torch.randn(4, 6))
    calls.clear()
    model.blocks[2].norm.register_forward_hook(lambda *_: calls.append("after"))
    layers(x)
    assert calls == ["before", "after"]
    assert dict(layers.named_modules())["blocks.1.first"] is model.blocks[1].first


def test_a_module_with_hooks_stays_whole():
    model = ResNet()
    calls = []
    model.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))
    layers = sequential(model, x := torch.randn(4, 6))
    calls.clear()
    layers(x)
    assert calls == [1]
    assert "self.blocks[1](" in repr(layers)


def test_tied_weights_stay_tied_under_both_names():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.mid, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)
            self.head.weight = self.tokens.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.mid(self.tokens(ids)))

    model = Tied()
    layers = sequential(model, torch.randint(0, 5, (3, 2)))
    assert layers.state_dict().keys() == model.state_dict().keys()
    assert [n for n, _ in layers.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert layers.state_dict()["head.weight"].data_ptr() == model.tokens.weight.data_ptr()
    plain = copy.deepcopy(model)
    pipe = Pipe(layers, [1, len(layers) - 1], devices=["cpu:0", "cpu:1"], chunks=2)
    pipe.load_state_dict(model.state_dict())
    ids = torch.randint(0, 5, (4, 2))
    pipe.train_batch(ids, loss_fn=torch.mean)
    plain(ids).mean().backward()
    for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_parameters_that_functions_use_keep_their_names():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.inner = nn.Parameter(torch.rand(4, 4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = F.linear(x, self.w)
            return F.linear(F.linear(x, self.inner.weight), self.w)

    model = Functional()
    layers = sequential(model, x := torch.randn(3, 4))
    assert len(layers) == 3
    assert layers.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(layers(x), model(x))


def test_layers_show_their_code():
    layers = sequential(Dense(), torch.randn(4, 6))
    assert "layers_0 = self.layers[0](" in repr(layers[0])
    assert "torch.cat(" in repr(layers)
    assert len(layers) == 5


class Backwards(nn.Module):
    """Runs its modules in another order than it has them."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.linear, self.unused = nn.Linear(4, 4), nn.Linear(2, 2)
        self.register_buffer("own", torch.rand(4))
        self.register_buffer("unsaved", torch.rand(4), persistent=False)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.tied(self.first(x)))
        return self.last(x + self.own + self.unsaved)


@pytest.mark.parametrize("around", [False, True])
def test_names_are_in_the_order_of_the_model_and_not_of_the_run(around):
    model = Backwards()
    pipe = Pipe(sequential(copy.deepcopy(model), torch.rand(3, 4)), "uniform", devices=["cpu:0"])
    ours, theirs = (nn.ModuleDict({"net": net}) if around else net for net in (pipe, model))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    if not around:
        for names in ("named_parameters", "named_buffers"):
            for each in (True, False):
                found = [n for n, _ in getattr(ours, names)(remove_duplicate=each)]
                assert found == [n for n, _ in getattr(theirs, names)(remove_duplicate=each)]
    swapped = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    swapped.update_parameters(pipe)
    for name, value in swapped.module.state_dict().items():
        assert torch.equal(value, pipe.state_dict()[name])


class Awkward(nn.Module):
    """Has children of names that a layer may have for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.skips = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.code, self.device, self.signature = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.takes = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.skips[1](self.skips[0](x)) * self.takes
        return self.signature(self.device(self.code(y))) + x + torch.arange(4, device=x.device)


def test_children_may_have_any_names():
    model, x = Awkward(), torch.rand(4, 4)
    pipe = Pipe(sequential(copy.deepcopy(model), x[:3, :]), "uniform", devices=["cpu:0", "cpu:1"])
    pipe.load_state_dict(model.state_dict())
    assert torch.equal(pipe(x), model(x))


def test_models_are_converted_by_several_threads_at_once():
    models = [ResNet() for _ in range(6)]
    x, before = torch.randn(3, 6), len
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda model: sequential(model, x), models))
    assert [repr(layers) for layers in found] == [repr(found[0])] * 6
    assert builtins.len is before
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
