"""What cannot be converted, or called, is refused with the reason; the model is as it was."""

from __future__ import annotations

import io
import random
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe, sequential
from tests.layers.conversion.models import (
    Does,
    Pair,
    ResNet,
    Transformer,
    hands_on,
    tokens,
)
from tests.support.running import Do
from tests.support.untouched import snapshot


def by_value(_: Any, x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = -x
    return x


def by_list(_: Any, x: Tensor) -> Tensor:
    return x * len(x.tolist())


def counts(model: Any, x: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return x


def casts(_: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.T @ x).float()


def by_chance(_: Any, x: Tensor) -> Tensor:
    return x * 2 if random.random() < 0.5 else x


def masks_speech(_: Any, x: Tensor) -> Tensor:
    mask_hidden_states = torch.relu
    return x if mask_hidden_states(x).sum() > 100 else x * 2


class DynamicCache:
    pass


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 4, 2, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (state, _) = self.rnn(x)
        return self.out(y), state


def table(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.b(m.a(x)), x.sum(0)


def counted(m: Any, x: Tensor) -> tuple[Tensor, int]:
    return m.b(m.a(x)), 2 * len(x)


class Frozen(ResNet):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.blocks[0].norm.training = False
        return self


def pair(between: Any, **attributes: Any) -> Any:
    """Makes a model that does this, and has these."""

    def build() -> nn.Module:
        model = Pair(between)
        for name, value in attributes.items():
            setattr(model, name, SimpleNamespace(**value) if type(value) is dict else value)
        return model

    return build


def does(forward: Any) -> Any:
    return lambda: Does(forward)


def hooked() -> nn.Module:
    model = Pair()
    model.register_forward_hook(lambda *_: None)
    return model


def traced(x: Any, y: Any) -> Any:
    return pair(lambda _, h: x(h) if torch._C._len_torch_function_stack() else y(h))


COLLECTS = pair(lambda m, x: m.seen.append(1) or x, seen=[])
X, CUT = torch.rand(3, 4), "cannot be cut into layers, "
LOOKS = traced(lambda h: h * 3, lambda h: h * 2)
REFUSED: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
    (pair(by_value), (X,), ValueError, rf"Pair {CUT}.*values in a tensor:\n .*if x\.sum\(\) > 0"),
    (pair(lambda _, x: -x if (x > 2).any().item() else x), (X,), ValueError,
     rf"{CUT}.*values in a tensor:\n .*item"),
    (pair(by_list), (X,), ValueError, rf"{CUT}.*takes values out.*tolist.*\n .*x\.tolist\(\)"),
    (does(lambda m, x: torch.autograd.grad(m.b(m.a(x.requires_grad_())).sum(), x)[0]), (X,),
     ValueError, rf"{CUT}.*takes values out.*\(grad\)"),
    (pair(counts), (X,), ValueError,
     rf"{CUT}its forward sets the attribute calls:\n .*model\.calls = .*\nMove this"),
    (COLLECTS, (X,), ValueError, rf"{CUT}its forward sets the attribute seen"),
    (pair(casts), (X,), ValueError, rf"{CUT}.*another mode .*autocast"),
    (pair(lambda _, x: x + torch.frombuffer(bytearray(16), dtype=torch.float32)), (X,),
     ValueError, rf"{CUT}it passes a Tensor that is made anew.*:\n .*frombuffer"),
    (pair(by_chance), (X,), ValueError, rf"{CUT}.*Python's random numbers:\n .*"),
    (pair(lambda m, x: m.layer(x, DynamicCache()), layer=Do(lambda x, cache: x)), (X,), ValueError,
     r"DynamicCache that is made anew.*\n.*\n.*with use_cache=False"),
    (pair(by_value, config={"layerdrop": 0.1}), (X,), ValueError,
     r"depends on the values.*\n.*\n.*with layerdrop=0\.0"),
    (pair(masks_speech, config={"apply_spec_augment": True}), (X,), ValueError,
     r"mask_hidden_states.*\n.*apply_spec_augment = False"),
    (pair(by_value, active_peft_config={"is_prompt_learning": True}), (X,), ValueError,
     r"Prefix and prompt tuning hand their prefix.*LoraConfig"),
    (LOOKS, (X,), RuntimeError, r"output in training differs.*\n.*same in every"),
    (traced(lambda h: h, torch.detach), (X,), RuntimeError,
     r"gradient of a\.\w+ in tr.*, of layer 0:"),
    (Recurrent, (torch.rand(3, 5, 4),), ValueError, r"output\[1\] of Rec.*batch in dimension 1"),
    (does(lambda m, x: m.a(x) @ m.b(x).T), (X,), ValueError,
     r"output of Does .*the batch in dimension 0 and 1"),
    (does(table), (X,), ValueError, r"output\[1\] of Does .*it has no batch"),
    (does(counted), (X,), ValueError, r"output\[1\] of Does is 6 for a batch of 3 and 2 .*of 1"),
    (does(lambda m, x: table(m, x) if m.training else m.b(m.a(x))), (X,), ValueError,
     r"output\[1\] of Does .*it has no batch"),
    (does(lambda m, images: m.b(m.a(torch.stack(images).mean((2, 3))))),
     ([torch.rand(3, 8, 8)] * 2,), ValueError, r"x is a list of 2 images .*backb"),
    (Frozen, (torch.rand(3, 6),), ValueError, r"train\(True\) leaves 'blocks.0.norm'"),
    (hooked, (X,), ValueError, r"Pair has hooks \(_forward_hooks\)"),
    (nn.ReLU, (X,), ValueError, "ReLU has no parameters"),
    (lambda: lambda x: x, (X,), TypeError, r"takes an nn\.Module, not function"),
    (lambda: Pipe(nn.Sequential(nn.Linear(2, 2)), [1]), (X,), TypeError, "a Pipe already"),
    (lambda: nn.Sequential(nn.LazyLinear(3)), (X,), ValueError, "lazy modules .*: run it once"),
    (lambda: Pair().to("meta"), (X,), ValueError, r"is on meta, .*verify=False"),
    (Pair, (1, 2), TypeError, r"too many positional arguments: Pair takes \(x\)"),
    (Pair, (torch.tensor(1.0),), ValueError, "holds no tensor with a batch"),
    (ResNet, (torch.rand(2, 5),), ValueError, r"ResNet itself, .*x: float32\[2, 5\].*raises"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "sample", "error", "message"), REFUSED)
def test_refused_and_the_model_is_as_it_was(build, sample, error, message):
    model = build()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        sequential(model, *sample)
    assert snapshot(model) == before or build is COLLECTS  # lists of its own are its own


def test_a_parameter_that_a_forward_writes_into_is_named():
    """MONAI's VQ-VAE moves its codes in each forward in training."""
    model = pair(lambda m, x: (x, m.a.bias.data.add_(1))[0])()
    with pytest.raises(RuntimeError, match=r"writes into the parameter a\.bias, .*it a buffer"):
        sequential(model, X)


@pytest.mark.parametrize("between", [by_value, by_list, counts, casts, by_chance])
def test_inside_of_a_model_they_are_left_whole(between):
    model = nn.Sequential(nn.Linear(4, 4), Pair(between), *(nn.Linear(4, 4) for _ in "abc"))
    layers = sequential(model, torch.rand(3, 4), verify=between is not by_chance)
    assert len(layers) == 5
    for x in (torch.rand(3, 4), -torch.rand(2, 4)):
        outputs = []
        for each in (layers, model):
            random.seed(3)
            outputs.append(each(x))
        assert torch.equal(*outputs)


def test_where_one_layer_has_most_of_the_model_there_is_a_warning():
    def net(width: int) -> nn.Module:
        odd = Pair(by_value)
        odd.more = nn.Linear(width, width)
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)), odd)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sequential(net(1), torch.rand(3, 4))
    with pytest.warns(UserWarning, match=r"9 \(Pair\) is one layer and has 9\d%.*\n.*x\.sum"):
        sequential(net(50), torch.rand(3, 4))


def test_a_model_on_meta_is_converted_without_the_check():
    with torch.device("meta"):
        model, sample = Transformer(), tokens()
    layers = sequential(model, *sample, verify=False)
    assert layers.state_dict().keys() == model.state_dict().keys()
    assert len(layers) == len(sequential(Transformer(), *tokens()))
    assert len(sequential(LOOKS(), X, verify=False)) == 2


def test_experts_in_one_tensor_are_converted_on_meta():
    def between(m: Any, x: Tensor) -> Tensor:
        order = m.gate(x).argmax(-1).argsort(stable=True)
        ends = torch.full((4,), x.shape[0], dtype=torch.int32)
        return F.grouped_mm(x[order], m.experts.view(4, 16, 16), offs=ends)

    def model() -> nn.Module:
        made = Does(lambda m, x: m.out(between(m, m.stem(x))), stem=nn.Linear(4, 16))
        made.gate, made.out = nn.Linear(16, 4), nn.Linear(16, 4)
        made.experts = nn.Parameter(torch.rand(4 * 16, 16))
        made.large = nn.Parameter(torch.rand(2**19))
        return made

    with torch.device("meta"):
        empty = model()
    layers = sequential(empty, X, verify=False)
    assert len(layers) == len(sequential(model(), X)) == 4
    assert all(parameter.is_meta for parameter in layers.parameters())


def test_a_method_that_is_handed_on_leaves_its_module_whole():
    model = nn.Sequential(hands_on(method=True), *(nn.Linear(4, 4) for _ in range(6)))
    (whole,) = [each for each in sequential(model, X).whole if each.path == "0"]
    assert "or a method of it" in whole.reason


def test_a_decision_by_ids_or_a_mask_is_asked_in_each_call():
    def forward(m: Any, x: Tensor) -> Tensor:
        padding = m.ids(x).eq(0) if m.whole else x.eq(0)
        h = m.b(m.a(m.table(x)))
        return h if not padding.any() else h.masked_fill(padding[..., None], 0.0)

    ids = torch.randint(1, 9, (3, 5))
    model = Does(forward, table=nn.Embedding(9, 4), whole=False)
    layers = sequential(model, ids)
    assert len(layers) == 3
    assert torch.equal(layers(ids[:2]), model(ids[:2]))
    pipe = Pipe(layers, [1, 2], devices=["cpu:0", "cpu:1"], chunks=3)
    padded = ids.clone()
    padded[1, -1] = 0
    with pytest.raises(ValueError, match=r"this was False; here it is True, .*\n.*padding\.any"):
        pipe(padded)
    assert torch.allclose(pipe(ids), model(ids), atol=1e-6)
    assert torch.equal(sequential(model, padded)(padded), model(padded))
    with pytest.raises(ValueError, match="depends on the values"):
        sequential(Does(forward, table=nn.Embedding(9, 4), whole=True, ids=Do(lambda x: x)), ids)


def test_a_norm_that_is_called_twice_and_time_first_are_named_at_conversion():
    encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    siamese = Does(lambda m, x: m.encoder(x) * m.encoder(-x), encoder=encoder)
    with pytest.warns(
        UserWarning, match=r"encoder\.1 \(BatchNorm1d\) is called 2 times.*pipe\(u\)"
    ):
        sequential(siamese, X)

    class Translates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.GRU(4, 4), nn.GRU(4, 4)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            return self.b(target, self.a(source)[1])[0]

    with pytest.raises(ValueError, match=r"size 3 in dimension 1: .*batch_first=True"):
        sequential(Translates(), torch.rand(7, 3, 4), torch.rand(5, 3, 4))


def test_a_compiled_model_is_converted_as_itself():
    compiled = torch.compile(Pair(), backend="eager")
    with pytest.warns(UserWarning, match=r"Pair is compiled, .*pipe\.compile\(\)"):
        layers = sequential(compiled, X)
    assert torch.equal(layers(X), compiled._orig_mod(X))
    with pytest.raises(TypeError, match=r"give it the module itself, .*pipe\.compile\(\)"):
        Pipe(compiled, [1, 1])


def test_a_dtype_that_changes_after_conversion_is_refused_where_it_matters():
    layers = sequential(Pair(lambda _, x: x * (x > 0).to(x.dtype)), X).double()
    assert layers(X.double()).dtype is torch.float64
    layers = sequential(Pair(lambda _, x: x * (x > 0).to(torch.float32)), X).double()
    with pytest.raises(TypeError, match="dtype of the parameters was changed after"):
        layers(X.double())
    layers = sequential(ResNet(), torch.rand(3, 6)).double()
    assert layers(torch.rand(3, 6).double()).dtype is torch.float64


def test_outputs_of_several_rows_a_sample_and_scalars_are_not_refused():
    model = Does(lambda m, x: (m.b(m.a(x)).flatten(0, 1), m.a(x).square().mean()))
    assert len(sequential(model, torch.rand(3, 5, 4))) == 3


@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_what_takes_longer_than_two_seconds_shows_its_progress(seconds, monkeypatch):
    """By the clock of tqdm, which is made up."""
    bars, now = pytest.importorskip("tqdm.std"), [0.0]
    monkeypatch.setattr(bars, "time", lambda: now[0])
    monkeypatch.setattr(bars.tqdm, "monitor_interval", 0)  # no thread that looks on
    monkeypatch.setattr(sys, "stderr", terminal := io.StringIO())
    terminal.isatty = lambda: True  # type: ignore[method-assign]

    def between(_: Pair, x: Tensor) -> Tensor:
        now[0] += seconds
        return x

    sequential(Pair(between), X, verify=False)
    assert ("sequential(Pair): " in terminal.getvalue()) == (seconds == 1.0)

    def fill(layer: nn.Module) -> None:
        now[0] += seconds
        nn.init.ones_(layer.weight)

    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    Pipe(layers, [2, 2], devices=["cpu:0", "cpu:1"], init_fn=fill)
    assert ("fill layers: " in terminal.getvalue()) == (seconds == 1.0)


def test_few_runs_are_needed():
    runs = []

    class Odd(Pair):
        def forward(self, x: Tensor) -> Tensor:
            x = self.b(self.a(x))
            if x.shape[0] > 2 and x.shape[1] > 3:
                x = x + 1
            return x * 2 if self.training else x

    class Deep(nn.Sequential):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            runs.append(1)
            return super().forward(x) + y

    layers = sequential(Deep(*(Odd() for _ in range(100))), *[torch.rand(3, 5, 4)] * 2)
    assert len(layers) == 100
    assert len(runs) <= 20
    layers(x := torch.rand(2, 7, 4), x)


def test_one_tensor_among_any_number_of_arguments_is_no_list_of_images():
    model = does(lambda m, *inputs: m.b(m.a(inputs[0])))()
    assert len(sequential(model, torch.randn(3, 5, 4))) == 2
