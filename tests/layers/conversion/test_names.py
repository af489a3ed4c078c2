"""Names, checkpoints and modules are those of the model, in pipes of any balance."""

from __future__ import annotations

import builtins
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe, sequential
from tests.layers.conversion.models import (
    Backwards,
    Dense,
    Halves,
    Pair,
    ResNet,
    Transformer,
    tokens,
)


def both(sizes: int = 2) -> tuple[nn.Module, Pipe]:
    model = Transformer()
    layers = sequential(copy.deepcopy(model), *tokens())
    balance = [4] * (sizes - 1) + [len(layers) - 4 * (sizes - 1)]
    return model, Pipe(layers, balance, devices=[f"cpu:{j}" for j in range(sizes)])


@pytest.mark.parametrize("sizes", [1, 2, 3])
def test_checkpoints_and_optimizers_move_between_model_and_pipes(sizes):
    model, pipe = both(sizes)
    _, other = both(4 - sizes)
    other.load_state_dict(pipe.state_dict(), assign=sizes == 1)
    model.load_state_dict(other.state_dict())
    ids, mask = tokens()
    assert torch.equal(model(ids, mask).logits, pipe(ids, mask).logits)
    changed = {name: torch.rand_like(value) for name, value in model.state_dict().items()}
    assert str(pipe.load_state_dict(changed)) == "<All keys matched successfully>"
    model.load_state_dict(changed)
    assert torch.equal(model(ids, mask).logits, pipe(ids, mask).logits)
    before, after = (torch.optim.Adam(each.parameters()) for each in (model, pipe))
    model(ids, mask).logits.sum().backward()
    before.step()
    after.load_state_dict(before.state_dict())
    for p, q in zip(model.parameters(), pipe.parameters(), strict=True):
        assert p.shape == q.shape
        assert before.state[p].keys() == after.state[q].keys()


def test_in_another_module_names_have_its_prefix_only():
    model = Backwards()
    pipe = Pipe(sequential(copy.deepcopy(model), torch.rand(3, 4)), "uniform", devices=["cpu:0"])
    around, plain = nn.ModuleDict({"net": pipe}), nn.ModuleDict({"net": model})
    assert list(around.state_dict()) == list(plain.state_dict())
    versions = around.state_dict()._metadata, plain.state_dict()._metadata
    assert versions[0]["net.last"] == versions[1]["net.last"] == {"version": 2}
    around.load_state_dict(plain.state_dict())
    ours, theirs = (
        {name for name, _ in each.named_parameters("m", remove_duplicate=False)}
        for each in (around, plain)
    )
    assert ours == theirs
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    averaged.update_parameters(pipe)
    for name, value in averaged.module.state_dict().items():
        assert torch.equal(value, pipe.state_dict()[name])


def test_hooks_of_a_state_dict_see_and_change_the_models_names():
    model, pipe = both()
    seen: list[str] = []

    def hook(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
        seen.extend(state)
        del state[seen[0]]

    pipe.register_state_dict_post_hook(hook)
    found = list(pipe.state_dict())
    assert seen == list(model.state_dict())
    assert found == seen[1:]


def test_a_state_dict_may_be_made_while_another_one_is() -> None:
    model, pipe = both()
    others: list[list[str]] = []

    def hook(module: nn.Module, *_: object) -> None:
        if not others:
            others.append([])
            others.append(list(module.state_dict()))

    pipe.register_state_dict_post_hook(hook)
    assert list(pipe.state_dict()) == others[1] == list(model.state_dict())


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


class NormWithChildren(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


def test_modules_are_the_very_objects_and_their_hooks_run():
    model, calls = ResNet(), []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append("inside"))
    model.blocks[1].first.register_forward_hook(lambda *_: calls.append("before"))
    layers = sequential(model, x := torch.randn(4, 6))
    calls.clear()
    model.blocks[2].norm.register_forward_hook(lambda *_: calls.append("after"))
    layers(x)
    assert calls == ["inside", "before", "after"]
    found, theirs = dict(layers.named_modules()), dict(model.named_modules())
    assert found["blocks.1.first"] is model.blocks[1].first
    assert {name for name in theirs if "." in name} - {"blocks.1", "blocks.2"} <= found.keys()
    assert "self.blocks[0](" in repr(layers)  # it has hooks, and stays whole
    norm = NormWithChildren()  # SyncBatchNorm, say, looks for it by its class
    assert norm in set(sequential(nn.Sequential(Pair(), norm), torch.randn(3, 4)).modules())


def test_layers_show_their_code_and_what_is_one_layer():
    layers = sequential(Dense(), torch.randn(4, 6))
    assert "layers_0 = self.layers[0](" in repr(layers[0])
    assert "torch.cat(" in repr(layers)
    layers = sequential(nn.Sequential(Pair(), Halves(), Pair(), Pair()), torch.rand(3, 4))
    (whole,) = layers.whole
    assert whole.path == "1"
    assert "if x.shape[0] > 2" in whole.line
    assert "decides by a size" in whole.reason


def test_models_are_converted_by_several_threads_one_after_another():
    inside, most, met = set(), [], threading.Barrier(2)

    def between(_: Pair, x: Tensor) -> Tensor:
        if torch.overrides._get_current_function_mode_stack():  # this thread traces
            inside.add(threading.get_ident())
            most.append(len(inside))
            if len(most) < 3:
                with suppress(threading.BrokenBarrierError):
                    met.wait(0.5)
            inside.discard(threading.get_ident())
        return x

    x, before = torch.randn(3, 4), len
    with ThreadPoolExecutor(2) as pool:
        models = [Pair(between), Pair(between)]
        found = list(pool.map(lambda model: sequential(model, x), models))
    assert set(most) == {1}
    assert repr(found[0]) == repr(found[1])
    assert builtins.len is before
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
