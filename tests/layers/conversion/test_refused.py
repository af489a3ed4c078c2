"""What cannot be converted is refused with the reason, and the model is left as it was."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import sequential
from tests.layers.conversion.models import ResNet, Transformer, tokens


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class ByValue(Pair):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.sum() > 0:
            x = -x
        return self.b(x)


class ByList(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * len(x.tolist())


class Counts(Pair):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(self.a(x))


class Casts(Pair):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.b(self.a(x).relu())


class Outside(Pair):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(__import__("numpy").random.rand(4).astype("float32"))
        return self.b(self.a(x) + noise)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ByValue, r"values in a tensor:\n .*if x\.sum\(\) > 0"),
        (ByList, r"takes values out of a tensor.*tolist.*\n .*x\.tolist\(\)"),
        (Counts, r"sets the attribute calls"),
        (Casts, r"another mode .*autocast"),
        (Outside, r"passes a Tensor that is made anew in every call:\n .*noise"),
    ],
)
def test_the_line_in_the_way_is_named(kind, message):
    if kind is Outside:
        pytest.importorskip("numpy")
    model, x = kind(), torch.rand(3, 4)
    before = state_of(model)
    with pytest.raises(ValueError, match=f"{kind.__name__} cannot be cut into layers, .*{message}"):
        sequential(model, x)
    assert_same_state(before, model)


@pytest.mark.parametrize("kind", [ByValue, ByList, Counts, Casts])
def test_inside_of_a_model_they_are_left_whole(kind):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(4, 4), kind(), *(nn.Linear(4, 4) for _ in "abc")])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.inner:
                x = layer(x).float()
            return x

    model = Net()
    layers = sequential(model, x := torch.rand(3, 4))
    assert len(layers) == 5
    for x in (torch.rand(3, 4), -torch.rand(2, 4)):
        assert torch.equal(layers(x), model(x))


def test_a_model_without_parameters():
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        sequential(nn.ReLU(), torch.rand(2, 2))
    with pytest.raises(TypeError, match=r"takes an nn\.Module, not function"):
        sequential(lambda x: x, torch.rand(2, 2))


def test_lazy_modules_run_once_before():
    with pytest.raises(ValueError, match="lazy modules that know no sizes yet: run it once"):
        sequential(nn.Sequential(nn.LazyLinear(3)), torch.rand(2, 2))


def test_models_on_meta_cannot_be_verified():
    with torch.device("meta"):
        model, sample = Transformer(), tokens()
    with pytest.raises(ValueError, match=r"is on meta, .*verify=False"):
        sequential(model, *sample)
    layers = sequential(model, *sample, verify=False)
    assert layers.state_dict().keys() == model.state_dict().keys()
    assert len(layers) == len(sequential(Transformer(), *tokens()))


def test_samples_that_do_not_fit():
    with pytest.raises(TypeError, match=r"too many positional arguments: ByValue takes \(x\)"):
        sequential(ByValue(), 1, 2)
    with pytest.raises(
        ValueError, match=r"ResNet itself, called with .*x: float32\[2, 5\].*raises"
    ):
        sequential(ResNet(), torch.rand(2, 5))
    with pytest.raises(ValueError, match="holds no tensor with a batch"):
        sequential(ByValue(), torch.tensor(1.0))


def test_hooks_of_the_model_itself_are_refused():
    model = ResNet()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"ResNet has hooks \(_forward_hooks\)"):
        sequential(model, torch.rand(3, 6))


def test_a_train_method_that_keeps_modules_back_is_refused():
    class Frozen(ResNet):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.blocks[0].norm.training = False
            return self

    with pytest.raises(ValueError, match=r"train\(True\) leaves 'blocks.0.norm'"):
        sequential(Frozen(), torch.rand(3, 6))


def test_what_differs_is_named_with_its_layer():
    class Tricky(Pair):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.b(x * 3 if torch.compiler.is_compiling() else x * 2)

    x = torch.rand(3, 4)
    with pytest.raises(RuntimeError, match=r"output in training differs, first in layer \d:"):
        sequential(Tricky(), x)
    assert len(sequential(Tricky(), x, verify=False)) == 2


def test_a_gradient_that_differs_is_named():
    class Tricky(Pair):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.b(x if torch.compiler.is_compiling() else x.detach())

    with pytest.raises(
        RuntimeError, match=r"gradient of a\.(weight|bias) differs, first in layer 0"
    ):
        sequential(Tricky(), torch.rand(3, 4))


def state_of(model: nn.Module) -> Any:
    return {
        "state": copy.deepcopy(model.state_dict()),
        "modes": [module.training for module in model.modules()],
        "grads": [parameter.grad for parameter in model.parameters()],
        "attributes": [vars(module).keys() for module in model.modules()],
        "random": torch.get_rng_state(),
        "python": random.getstate(),
    }


def assert_same_state(before: Any, model: nn.Module) -> None:
    now = state_of(model)
    assert all(torch.equal(now["state"][key], value) for key, value in before["state"].items())
    assert torch.equal(now.pop("random"), before["random"])
    for key in ("modes", "grads", "attributes", "python"):
        assert now[key] == before[key], key


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_as_it_was(training):
    for model, sample in ((ResNet(), (torch.rand(3, 6),)), (Transformer(p=0.2), tokens())):
        model.train(training)
        if isinstance(model, ResNet):
            model.blocks[1].norm.eval()  # frozen by hand
        before = state_of(model)
        sequential(model, *sample)
        assert_same_state(before, model)


def test_random_numbers_of_others_are_as_they_were():
    numpy = pytest.importorskip("numpy")

    class Jitter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0 * (random.random() + numpy.random.rand())

    model = nn.Sequential(nn.Linear(4, 4), Jitter())
    before = random.getstate(), str(numpy.random.get_state())
    sequential(model, torch.rand(3, 4))
    assert (random.getstate(), str(numpy.random.get_state())) == before


def test_a_dtype_that_changes_after_conversion_is_refused_where_it_matters():
    class Masks(Pair):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.b(x * (x > 0).to(x.dtype))

    layers = sequential(Masks(), torch.rand(3, 4)).double()
    with pytest.raises(TypeError, match="dtype of the parameters was changed after"):
        layers(torch.rand(3, 4).double())
    layers = sequential(ResNet(), torch.rand(3, 6)).double()
    assert layers(torch.rand(3, 6).double()).dtype is torch.float64


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 4, 2, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (state, _) = self.rnn(x)
        return self.out(y), state


class Pairs(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) @ self.b(x).T


class Table(Pair):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.b(self.a(x)), torch.arange(4.0)


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (Recurrent(), torch.rand(3, 5, 4), r"output 1 of Recurrent .*the batch in dimension 1"),
        (Pairs(), torch.rand(3, 4), r"output 0 of Pairs .*the batch in dimension 0 and 1"),
        (Table(), torch.rand(3, 4), r"output 1 of Table .*it has no batch"),
    ],
)
def test_outputs_with_the_batch_elsewhere_are_refused(model, x, message):
    with pytest.raises(ValueError, match=message):
        sequential(model, x)


def test_outputs_of_several_rows_a_sample_and_scalars_are_not():
    class Rows(Pair):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.a(x)
            return self.b(x).flatten(0, 1), x.square().mean()

    assert len(sequential(Rows(), torch.rand(3, 5, 4))) == 2


class Sampled(Pair):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        z = x + torch.randn_like(x) if self.training else x
        return self.b(z)


class Auxiliary(Pair):
    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        if self.training:
            return x, self.b(x)
        return x


@pytest.mark.parametrize(
    ("kind", "line"), [(Sampled, "z = x .* if self.training"), (Auxiliary, "return x, self.b")]
)
def test_what_differs_between_training_and_evaluation_is_named(kind, line):
    message = (
        rf"otherwise in training than in evaluation.*:\n.*{line}.*\nMove the lines that differ"
    )
    with pytest.raises(ValueError, match=message):
        sequential(kind(), torch.rand(3, 4))


def test_lists_of_images_are_refused():
    class Detects(Pair):
        def forward(self, images: list[Tensor]) -> Tensor:
            return self.b(self.a(torch.stack(images).mean((2, 3))))

    with pytest.raises(ValueError, match=r"images is a list of 2 images .*detection.*backbone"):
        sequential(Detects(), [torch.rand(3, 8, 8), torch.rand(3, 9, 9)])


def test_what_is_one_layer_and_why_can_be_asked():
    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.many = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
            self.odd = ByValue()
            self.odd.more = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.odd(self.many(x))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (whole,) = sequential(Net(1), torch.rand(3, 4)).whole
    assert whole.path == "odd"
    assert "if x.sum() > 0" in whole.line
    assert "values in a tensor" in whole.reason
    with pytest.warns(UserWarning, match=r"odd \(ByValue\) is one layer and has 9\d%.*\n.*x\.sum"):
        sequential(Net(50), torch.rand(3, 4))
