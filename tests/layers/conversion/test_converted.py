"""Converted models are called as the models are, with their names, and compute what they compute.

In pipes of any shape, bit for bit.
"""

from __future__ import annotations

import builtins
import copy
import functools
import gc
import importlib
import linecache
import pickle
import re
import threading
import weakref
from collections import OrderedDict, UserDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing import assert_close

from benchmarks.converted import MODELS, compared, without_dropout
from syncpipe import NoChunk, Pipe, sequential, verify
from syncpipe.data.trees import tensors_in
from tests.layers.conversion.models import (
    CASES,
    Backwards,
    Dense,
    Does,
    Halves,
    Pair,
    ResNet,
    Transformer,
    padded,
    tokens,
)
from tests.support import compare
from tests.support.models import in_turn, step


def values(output: Any) -> list[Tensor]:
    return [t for t in tensors_in(output) if t.is_floating_point()]


def converted(name: str, **options: Any) -> tuple[nn.Module, Pipe]:
    """A model, and a pipe of it, which was converted with a sample of three."""
    torch.manual_seed(3)
    model = CASES[name].build()
    plain = copy.deepcopy(model)
    layers = sequential(model, *CASES[name].sample(3))
    options = {"balance": "uniform", "devices": ["cpu:0", "cpu:1"], "chunks": 2, **options}
    return plain, Pipe(layers, **options)


def assert_same(plain: nn.Module, pipe: Pipe, inputs: tuple[Tensor, ...]) -> None:
    """Outputs, gradients and buffers, in the modes that both are in."""
    kinds = set()

    def run(model: nn.Module) -> Any:
        def call(given: Any) -> list[Tensor]:
            output = model(*(t.clone() for t in given))
            kinds.add(type(output))
            return values(output)

        return call

    # Gradients are summed in another order, or from other memory.
    theirs = step(in_turn(run(plain), pipe.chunks), plain, inputs)
    ours = step(run(pipe), pipe, inputs)
    compare.assert_same(ours, theirs, rounded={"parameter_grads"}, rtol=1.3e-6)
    assert len(kinds) == 1


def test_containers_of_a_sample_are_kept_without_its_tensors() -> None:
    model, x = nn.Module(), torch.rand(3, 4)
    model.layer = nn.Linear(4, 4)
    model.forward = lambda batch: model.layer(batch["x"])  # type: ignore[method-assign]
    layers, alive = sequential(model, UserDict(x=x)), weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None
    assert layers(UserDict(x=torch.rand(2, 4))).shape == (2, 4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*nested_tensor")
@pytest.mark.parametrize("name", CASES)
def test_outputs_gradients_buffers_and_names(name):
    case = CASES[name]
    plain, pipe = converted(name)
    assert len(pipe) == case.layers
    for names in ("named_parameters", "named_buffers"):
        for unique in (True, False):
            found, theirs = (getattr(m, names)(remove_duplicate=unique) for m in (pipe, plain))
            assert [name for name, _ in found] == [name for name, _ in theirs]
    assert list(pipe.state_dict()) == list(plain.state_dict())
    inputs = [case.sample(4), case.sample(3)]  # the last micro-batch of which is one sample
    if case.sample in (padded, tokens):
        inputs.append(case.sample(4, 5))
    if case.sample is padded:
        inputs.append(case.sample(4, 6, left=True))
    for given_inputs in inputs:
        norms = any(isinstance(m, nn.BatchNorm1d) for m in plain.modules())
        if not norms or len(given_inputs[0]) % 2 == 0:
            assert_same(plain.train(), pipe.train(), given_inputs)
        assert_same(plain.eval(), pipe.eval(), given_inputs)
        with torch.no_grad():  # PyTorch nests what is padded here
            assert_same(plain, pipe, given_inputs)


def test_dropout_obeys_the_mode():
    drops = Pair(lambda m, x: F.dropout(x, 0.5, training=m.training))
    for model, sample in ((Transformer(p=0.5), tokens(8)), (drops, (torch.randn(3, 4),))):
        layers = sequential(model.eval(), *sample)
        assert not layers.training
        found = [values(layers.train()(*sample))[0] for _ in range(2)]
        assert not torch.equal(*found)
        assert torch.equal(values(layers.eval()(*sample))[0], values(model.eval()(*sample))[0])


def casts(m: Any, x: Tensor) -> Tensor:
    """Casts to the dtype of others, early and late, and to one of its own."""
    dtype = x.dtype
    h = m.middle(x)
    small = h.float().pow(2).mean(-1, keepdim=True) + 1
    kept = torch.zeros(h.shape, dtype=h.dtype)
    kept[:, :2] = (h / small.to(torch.float32))[:, :2].to(h.dtype)
    return (kept + (h * small).to(dtype)).to(m.b.weight.dtype)


@pytest.mark.parametrize("early", [False, True])
def test_dtypes_of_other_tensors_are_followed_under_autocast(early):
    model = Does(lambda m, x: m.b(casts(m, m.a(x))), middle=nn.Linear(4, 4))
    x = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=early):
        pipe = Pipe(sequential(model, x), [1, 2], devices=["cpu:0", "cpu:1"])
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert torch.equal(pipe(x), model(x))
            assert pipe(x).dtype is model(x).dtype


def test_copies_and_pickles():
    _, pipe = converted("attributes")
    inputs = (torch.randn(8, 4),)
    expected = pipe(*inputs)
    for copied in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert torch.equal(copied(*inputs), expected)
        assert repr(copied) == repr(pipe)


def test_compiled_layers():
    _, pipe = converted("attributes")
    inputs = (torch.randn(8, 4),)
    expected = pipe(*inputs)
    if torch.__version__ < "2.12":
        with pytest.raises(RuntimeError, match="needs PyTorch 2"):
            pipe.compile(backend="eager")
        return
    for layer in pipe:
        layer.forward = torch.compile(layer.forward, backend="eager")
    assert torch.equal(pipe(*inputs), expected)


def test_values_are_dropped_after_their_last_use():
    alive: list[weakref.ref[Tensor]] = []
    most = []

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            alive.append(weakref.ref(x))
            most.append(sum(ref() is not None for ref in alive))
            return x * 2

    def between(_: Pair, x: Tensor) -> Tensor:
        for k in range(20):
            x = Counts.apply(x) + k
        return x

    layers = sequential(Pair(between), x := torch.randn(3, 4), verify=False)
    alive.clear()
    most.clear()
    with torch.no_grad():
        layers(x)
    assert len(most) == 20
    assert max(most) <= 2


def test_gradients_are_on_again_after_an_error():
    def between(model: Pair, x: Tensor) -> Tensor:
        with torch.no_grad():
            other = model.b(x)
        return x + other

    layers = sequential(Pair(between), x := torch.randn(3, 4))
    dict(layers.named_modules())["b"].weight.data = torch.zeros(4, 5)
    with pytest.raises(RuntimeError):
        layers(x)
    assert torch.is_grad_enabled()


def test_a_value_is_told_from_one_that_is_the_same_object():
    model = Pair(lambda m, x: x - m.same(x))
    model.same = nn.Identity()
    layers = sequential(model, x := torch.randn(3, 4))
    names = dict(layers.named_modules())
    names["same"].register_forward_hook(lambda *given: given[2] * 2)
    assert torch.equal(layers(x), names["b"](-names["a"](x)))


def import_with_operators(package: str) -> None:
    """Imports torchvision, without its compiled operators if they are not for this PyTorch."""
    try:
        importlib.import_module(package)
    except RuntimeError:
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"{package}::{operator}", "(Tensor a, Tensor b, float c) -> Tensor"
            )
        importlib.import_module(package)


#: One model of each kind in the zoo of benchmarks; those by hand always run.
EACH_KIND = (
    "torchvision SqueezeNet", "torchvision ResNet-18", "timm EVA-02", "timm LCNet",
    "HF GPT-2 (tied)", "HF Llama (mask)", "HF Qwen3-MoE", "HF BERT (mask)", "HF T5", "HF ViT",
    "HF LLaVA", "diffusers FLUX", "diffusers UNet (Stable Diffusion)", "MONAI UNet",
    "open_clip CLIP", "x-transformers decoder", "vit-pytorch ViT", "PyG GCN", "GPT with a loss",
    "U-Net", "VAE", "experts on chosen rows", "LSTM", "nn.Transformer", "dataclass output",
    "reentrant checkpoint", "spiking", "Fourier operator", "several tasks", "local attention",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EACH_KIND)
def test_models_of_the_zoo(name):
    made = MODELS[name]
    try:
        if made.package:
            import_with_operators("torchvision")  # the others look at it
            importlib.import_module(made.package)
    except ImportError as error:
        pytest.skip(f"not installed: {error}")
    torch.manual_seed(1)
    model, args, kwargs = made.make(batch=2)
    layers = sequential(without_dropout(model), *args, **kwargs)
    assert list(layers.state_dict()) == list(model.state_dict())
    assert [n for n, _ in layers.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert len(layers) > 2
    # Gradients of tied weights are summed in another order; LLaVA's Llama gets a mask while it is
    # traced, and does without it otherwise, by another kernel.
    words = ("verified",) if name == "VAE" else ("to the bit", "to rounding")
    assert compared(model, layers, made) in words[: 1 + ("tied" in name or "LLaVA" in name)]


# --- calls ----------------------------------------------------------------------------------------


class Two(Pair):
    """Takes all that a function can take."""

    def forward(self, x, /, y=None, *rest, scale=1.0, **more):
        h = self.a(x)
        for other in [y, *rest, *more.values()]:
            if other is not None:
                h = h + other
        return self.b(h) * scale


def two(*args: Any, **kwargs: Any) -> tuple[nn.Module, Pipe]:
    model = Two()
    layers = sequential(model, *args, **kwargs)
    return model, Pipe(layers, [1, 1], devices=["cpu:0", "cpu:1"], chunks=2)


def transformer() -> Pipe:
    layers = sequential(Transformer(), *tokens())
    return Pipe(layers, "uniform", devices=["cpu:0", "cpu:1"], chunks=2)


def test_positional_keyword_and_variable_arguments():
    def given(n: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (torch.rand(n, 4), torch.rand(n, 1), torch.rand(n, 4)), {"z": torch.rand(n, 4)}

    args, kwargs = given(3)
    model, pipe = two(*args, **kwargs)
    args, kwargs = given(6)
    assert_close(pipe(*args, **kwargs), model(*args, **kwargs))


def test_an_argument_may_be_a_container_that_only_pytree_knows():
    def given(n: int) -> Any:
        return torch.rand(n, 4, 5).max(2)

    model = Does(lambda m, found: m.b(m.a(found.values)) + found.indices)
    layers, found = sequential(model, given(3)), given(5)
    assert torch.equal(layers(found), model(found))


@pytest.mark.parametrize("form", [tuple, dict, OrderedDict, UserDict, MappingProxyType])
def test_train_batch_takes_tuples_as_arguments_and_mappings_by_name(form):
    (ids, mask), pipe = tokens(), transformer()
    given = (ids, mask) if form is tuple else form({"mask": mask, "ids": ids})
    loss, output = pipe.train_batch(
        given, loss_fn=lambda output: output.logits.mean(), return_outputs=True
    )
    assert torch.equal(output.logits, pipe(ids, mask).logits)
    assert torch.allclose(loss, output.logits.mean())
    assert torch.equal(pipe.eval_batch(given).logits, pipe(ids, mask=mask).logits)
    of_many = pipe.train_batch(
        data_iter=iter([(given, None)] * 2), loss_fn=lambda o: o.logits.mean()
    )
    assert_close(of_many, loss)


def test_the_target_is_taken_out_of_a_mapping():
    def loss_fn(output: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())

    (ids, mask), pipe = tokens(), transformer()
    batch = UserDict({"ids": ids, "mask": mask, "labels": ids})
    loss = pipe.train_batch(batch, target="labels", loss_fn=loss_fn)
    assert_close(loss, loss_fn(pipe(ids, mask), ids).detach())
    assert sorted(batch) == ["ids", "labels", "mask"]
    assert_close(pipe.eval_batch(batch, target="labels", loss_fn=loss_fn), loss)


def test_one_tensor_beside_what_has_to_be_as_in_the_sample():
    x = torch.rand(4, 4)
    model, pipe = two(torch.rand(3, 4), scale=2.0)
    assert_close(pipe(x, scale=2.0), model(x, scale=2.0))
    assert verify(pipe, {"x": x}, loss_fn=lambda y: y.square().mean()).ok
    for call in (pipe, lambda x: pipe.train_batch(x, loss_fn=torch.mean)):
        with pytest.raises(ValueError, match=r"scale is 2\.0, and here it is 1\.0"):
            call(x)


def test_tensors_without_the_batch_go_whole():
    model, pipe = two(torch.rand(3, 4), torch.rand(4))
    x, y = torch.rand(6, 4), torch.rand(4)
    assert_close(pipe(x, y), model(x, y))
    pipe.train_batch((x, y), loss_fn=torch.mean)
    square = torch.rand(4, 4)  # where NoChunk says by hand what goes whole
    model, pipe = two(torch.rand(4, 4), NoChunk(square[:1]))
    assert_close(pipe(square, square[:1]), model(square, square[:1]))
    assert_close(pipe(square, NoChunk(square[:1])), model(square, square[:1]))


def similar(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    scale = m.scale.exp() if m.training else m.scale
    return F.normalize(m.b(m.a(x)), dim=-1), scale, m.centers * 2, x.mean() if m.mean else scale


def test_outputs_of_parameters_alone_are_returned_as_they_are():
    parts = {"scale": nn.Parameter(torch.tensor(0.5)), "centers": nn.Parameter(torch.rand(2, 4))}
    x = torch.rand(8, 4)

    def loss(output: tuple[Tensor, ...]) -> Tensor:
        y, scale, centers, _ = output
        return (scale * y @ centers.T).square().mean()

    def run(model: nn.Module) -> list[Tensor]:
        output = model(x)
        return [*output, *torch.autograd.grad(loss(output), [*model.parameters()])]

    model = Does(similar, mean=False, **parts)
    layers = sequential(model, x[:3])
    pipe = Pipe(layers, balance="uniform", devices=["cpu:0", "cpu:1"], chunks=3)
    for mode in (True, False):
        assert_close(run(pipe.train(mode)), run(model.train(mode)))
        assert_close(pipe.eval_batch(x), model.eval()(x))
        pipe.train(mode)
        assert_close(pipe.eval_batch(x, loss_fn=loss, verify=True), loss(model.eval()(x)))
    pipe.train()
    value, output = pipe.train_batch(x, loss_fn=loss, return_outputs=True, verify=True)
    assert_close((value, output), (loss(model(x)), model(x)))
    assert verify(pipe, x, loss_fn=loss).ok
    with FakeTensorMode(allow_non_fake_inputs=True):  # tensors without values
        assert pipe(torch.rand(8, 4))[2].shape == (2, 4)
    layers = sequential(Does(similar, mean=True, **parts), x[:3])
    pipe = Pipe(layers, balance="uniform", devices=["cpu:0", "cpu:1"], chunks=3)
    with pytest.raises(ValueError, match=r"output\[3\] is a tensor without dimensions"):
        pipe(x)


class Scale(Tensor):
    pass


@pytest.mark.parametrize("kind", [Tensor, Scale])
def test_an_output_without_the_batch_that_micro_batches_draw_differently_is_refused(kind):
    model = Does(lambda m, x: (m.b(m.a(x)), F.dropout(m.scale)))
    model.register_buffer("scale", torch.ones(64).as_subclass(kind))
    layers = sequential(model, torch.rand(3, 4))
    pipe = Pipe(layers, balance="uniform", devices=["cpu:0", "cpu:1"], chunks=2)
    with pytest.raises(ValueError, match=r"output\[1\] .* differs between micro-batches"):
        pipe(torch.rand(8, 4))


@pytest.mark.parametrize("whole", [True, False])
def test_a_batch_size_that_is_another_size_as_well_shows_what_is_cut(whole):
    """By what the model takes with another batch size."""
    model = Two()
    layers = sequential(model, torch.rand(4, 4), torch.rand(4) if whole else torch.rand(4, 1))
    pipe = Pipe(layers, [1, 1], devices=["cpu:0", "cpu:1"], chunks=2)
    x, y = torch.rand(6, 4), torch.rand(4) if whole else torch.rand(6, 1)
    assert_close(pipe(x, y), model(x, y))


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((), {}, TypeError, "missing a required argument: 'x'"),
        ((torch.rand(4, 4),), {}, ValueError, "y is a tensor, and here it is None"),
        ((torch.rand(4, 4),) * 3, {}, ValueError, r"rest\[0\] is not there, and here it is a te"),
        ((torch.rand(4, 4),) * 2, {"scale": 2.0}, ValueError, "scale is 1.0, and here it is 2.0"),
        ((torch.rand(4, 4),) * 2, {"more": 1}, ValueError, r"more\S* is not there, .* is 1,"),
        ((torch.rand(4, 4), torch.rand(3, 4)), {}, ValueError, r"x'\]: .* of 2, 2\n.*of 2, 1"),
        ((torch.rand(4, 5), torch.rand(4, 4)), {}, ValueError, r"x is float32\[4, 5\]"),
        ((torch.rand(4, 4), torch.ones(4, 4).bool()), {}, ValueError, r"y is bool\[4, 4\]"),
    ],
)
def test_calls_unlike_the_sample_are_refused(args, kwargs, error, message):
    _, pipe = two(torch.rand(3, 4), torch.rand(3, 4))
    with pytest.raises(error, match=message):
        pipe(*args, **kwargs)
    if not kwargs:
        with pytest.raises(error, match=message):
            pipe.train_batch(args, loss_fn=torch.mean)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.b(self.a(x) + y)


def test_arguments_in_one_tuple_or_dict_are_unpacked_for_a_call():
    x, y = torch.rand(4, 4), torch.rand(4, 4)
    with pytest.raises(TypeError, match=r"argument: 'y'.*Unpack the tuple: \*batch"):
        sequential(Both(), (x, y))
    pipe = Pipe(sequential(Both(), x, y), [1, 1], devices=["cpu:0", "cpu:1"], chunks=2)
    with pytest.raises(TypeError, match=r"argument: 'y'.*Unpack the dict: \*\*batch"):
        pipe({"x": x, "y": y})
    pipe.train_batch((x, y), loss_fn=torch.mean)


def with_defaults(forward: Any) -> Any:
    """Fills in keyword arguments that were not given, as libraries do."""

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("scale") is None:
            kwargs["scale"] = 2.0
        return forward(self, *args, **kwargs)

    return wrapped


class Decorated(Pair):
    @with_defaults
    def forward(self, x, mask=None, scale=None):
        return self.b(self.a(x)) * scale * mask


def test_keyword_arguments_of_the_sample_are_keyword_arguments():
    model, mask = Decorated(), torch.rand(3, 1)
    layers = sequential(model, torch.rand(3, 4), mask=mask)
    x = torch.rand(3, 4)
    for found in (layers(x, mask), layers(x=x, mask=mask), layers(x, scale=None, mask=mask)):
        assert_close(found, model(x, mask=mask))


def test_ordinary_pipes_take_exactly_one_input():
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4)), [1], devices=["cpu:0"])
    x = torch.rand(2, 4)
    assert torch.equal(pipe(input=x), pipe(x))
    for args in ((), (x, x)):
        with pytest.raises(TypeError, match="takes one input"):
            pipe(*args)


class Steps(Pair):
    """Goes through a dimension in a loop, which is written out."""

    def __init__(self, dim: int, only_in: bool | None) -> None:
        super().__init__()
        self.dim, self.only_in = dim, only_in

    def forward(self, x: Tensor) -> Tensor:
        if self.only_in not in (None, self.training):
            return self.b(self.a(x))
        steps = [self.a(x.select(self.dim, k)) for k in range(x.shape[self.dim])]
        return self.b(torch.stack(steps, self.dim))


@pytest.mark.parametrize("only_in", [None, True, False])
def test_a_size_that_the_model_decides_by_must_be_the_samples(only_in):
    model = Steps(1, only_in)
    layers = sequential(model, torch.rand(2, 3, 4))
    x = torch.rand(5, 3, 4)
    assert torch.equal(layers(x), model(x))
    with pytest.raises(ValueError, match=r"x is float32\[5, 2, 4\].* float\[any, 3, 4\]"):
        layers(x[:, :2])
    with pytest.warns(UserWarning, match=r"batches of 3 only.*\n.*for k in range") as caught:
        layers = sequential(Steps(0, only_in), torch.rand(3, 4))  # which is said at conversion
    assert len(caught) == 1
    with pytest.raises(ValueError, match=r"x is float32\[2, 4\]"):
        layers(torch.rand(2, 4))
    pipe = Pipe(layers, [len(layers)], devices=["cpu:0"], chunks=2)  # as the warning says
    assert pipe(torch.rand(6, 4)).shape == (6, 4)


def turns(_: Pair, x: Tensor) -> Tensor:
    if x.shape[0] != 1 and x.shape[1] == 5:
        x = -x
    return x


def small_in_evaluation(m: Pair, x: Tensor) -> Tensor:
    """In training a guard refuses short inputs, which evaluation multiplies by a plain number."""
    if m.training:
        return x if x.shape[1] > 4 else -x
    return x * min(len([0] * x.shape[1]), 6)


def test_a_size_that_training_refuses_and_evaluation_does_not_notice():
    model = Pair(small_in_evaluation)
    layers = sequential(model, torch.rand(2, 6, 4))
    x = torch.rand(2, 12, 4)
    with suppress(ValueError):
        assert torch.equal(layers(x), model(x))
    layers.eval()
    with pytest.raises(ValueError, match="depends on these sizes"):
        layers(x[:, :3])


class Mode(nn.Module):
    """Passes its input on; ``asks`` for its mode, or has a ``train`` of its own."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        return x if self.asks and self.training else x + 0


class Switches(Mode):
    def train(self, mode: bool = True) -> Any:
        return super().train(mode)


def hooked() -> nn.Module:
    module = nn.ReLU()
    module.register_forward_hook(lambda own, args, output: output if own.training else output + 0)
    return module


@pytest.mark.parametrize(
    ("part", "runs"),
    [(Mode, 6), (nn.ReLU, 6), (hooked, 9), (Switches, 9), (lambda: Mode(asks=True), 9)],
)
def test_both_modes_are_run_where_a_mode_may_matter(part, runs):
    """As it is, for the sample, for other sizes, for another batch, and to compare the layers."""
    model, calls = Does(lambda m, x: m.b(m.part(m.a(x))), part=part()), []
    inner = model.inner
    model.inner = lambda m, x: calls.append(x.shape) or inner(m, x)
    sequential(model, torch.rand(2, 6, 4))
    assert len(calls) == runs


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        x = self.inner(x)
        return x if x.shape[1] > 5 else -x


def test_a_module_is_left_whole_in_the_runs_that_showed_why():
    model, calls = Does(lambda m, x: m.b(m.part(m.a(x))), part=Asks()), []
    inner = model.inner
    model.inner = lambda m, x: calls.append(x.shape) or inner(m, x)
    layers = sequential(model, x := torch.rand(2, 6, 4))
    assert [leaf.path for leaf in layers.whole] == ["part"]
    assert len(calls) == 6
    assert torch.equal(layers(x), model(x))
    assert torch.equal(layers(x[:, :3]), model(x[:, :3]))


class Returns(nn.Module):
    """Also returns what it decided by a value."""

    def __init__(self, decided):
        super().__init__()
        self.decided = decided

    def forward(self, x):
        return x, self.decided(x, bool(x.sum() > 0))


@pytest.mark.parametrize(
    "decided",
    [
        lambda _, yes: yes,
        lambda _, yes: "yes" * yes,
        lambda _, yes: None if yes else [None],
        lambda x, yes: [x] * yes,
        lambda x, yes: {"yes": x} if yes else {},
    ],
)
def test_a_flag_that_a_module_returns_is_checked_in_every_call(decided):
    model = Does(lambda m, x: m.b(m.a(x)) * (2 if m.part(x)[1] else 3), part=Returns(decided))
    layers = sequential(model, x := torch.rand(3, 4))
    assert torch.equal(layers(x[:2]), model(x[:2]))
    with pytest.raises(ValueError, match=r"this was .*; here it is .*\n.*what part returns"):
        layers(-x)


class Changes(Asks):
    """Takes the last entry out of a list, and adds what it returns to another one."""

    def forward(self, values, kept):
        x = super().forward(values[0].pop())
        kept[0].append(x)
        return x


def test_lists_that_a_module_changes_are_given_as_they_were():
    def forward(m: Any, x: Tensor) -> Tensor:
        values, kept = [x, m.a(x)], list[Tensor]()
        m.part((values,), (kept,))
        return m.b(kept[0] + values[-1] * len(values))

    model = Does(forward, part=Changes())
    layers = sequential(model, x := torch.rand(2, 6, 4))
    for given in (x, x[:, :3]):
        assert torch.equal(layers(given), model(given))


@pytest.mark.parametrize("first", [nn.Linear(4, 4), nn.LayerNorm(4)])
def test_no_run_for_a_size_that_a_weight_has(first):
    """The features of the input are not varied, because a module refuses any other number."""
    model, shapes = Does(lambda m, x: m.b(m.first(x.to(x.dtype))), first=first), list[Any]()
    inner = model.inner
    model.inner = lambda m, x: shapes.append(x.shape) or inner(m, x)
    layers: Any = sequential(model, torch.rand(2, 6, 4))
    assert {tuple(map(int, shape)) for shape in shapes} == {(2, 6, 4), (1, 6, 4), (1, 3, 4)}
    assert layers[0]._model_signature.free == {(0, 0), (0, 1)}


#: What the sample of 3 x 8 does not show, and neither do the sizes that are tried beside it.
UNSEEN: dict[str, Any] = {
    "pieces": lambda _, x: torch.cat(x.split(8, 1)[::-1], 1),
    "pieces of the batch": lambda _, x: torch.cat([c * k for k, c in enumerate(x.chunk(4))]),
    "layout": lambda _, x: x * (2.0 if x.transpose(0, 1).is_contiguous() else 1.0),
    "two decisions in a line": turns,
    "a remainder": lambda _, x: x * [1.0, 2.0, 3.0, 4.0][x.shape[1] % 4],
}


@pytest.mark.filterwarnings("ignore:Pair was converted for batches of 3 only")
@pytest.mark.parametrize("name", UNSEEN)
def test_a_call_gives_what_the_model_gives_or_is_refused(name):
    model, refused = Pair(UNSEEN[name]), list[str]()
    layers = pickle.loads(pickle.dumps(sequential(model, torch.rand(3, 8, 4))))
    sizes = [(3, 8), (1, 8), (8, 8), (2, 4), (3, 5), (2, 16)]
    for x in [torch.rand(*size, 4) for size in sizes]:
        try:
            found = layers(x)
        except ValueError as error:
            refused.append(str(error))
        else:
            assert torch.equal(found, model(x))
    assert 0 < len(refused) < len(sizes)
    assert all(re.search("would do something else|depends on these sizes", t) for t in refused)


def test_a_function_with_a_cache_that_was_written_after_other_conversions_is_found(monkeypatch):
    for _ in range(2):  # the first one may import modules
        sequential(Pair(), torch.rand(3, 4))
    monkeypatch.setitem(globals(), "half", functools.cache(lambda size: size // 2))
    x = torch.rand(3, 8, 4)
    layers = sequential(model := Pair(lambda _, x: x[:, : globals()["half"](x.shape[1])]), x)
    for x in (torch.rand(3, length, 4) for length in (8, 6, 16)):
        assert torch.equal(layers(x), model(x))


BESIDE = Path(torch.__file__).parent.with_name("torchvision") / "models.py"
CUTS = "def between(_, x):\n    if x.shape[1] > 100:\n        x = x[:, :100]\n    return x\n"


def test_a_decision_by_a_size_is_checked_in_every_call_and_named_in_packages_too(monkeypatch):
    """The name of torchvision's folder begins with that of PyTorch's, whose lines are not named."""
    scope: dict[str, Any] = {}
    exec(compile(CUTS, str(BESIDE), "exec"), scope)
    monkeypatch.setitem(linecache.cache, str(BESIDE), (len(CUTS), None, CUTS.splitlines(), ""))
    layers = sequential(Pair(scope["between"]), torch.rand(2, 9, 4))
    assert layers(torch.rand(2, 50, 4)).shape == (2, 50, 4)
    line = rf"\n  {re.escape(str(BESIDE))}:2, in between: if x\.shape\[1\] > 100"
    with pytest.raises(ValueError, match=f"would do something else:{line}"):
        layers(torch.rand(2, 101, 4))


# --- names ----------------------------------------------------------------------------------------


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
    """Also of one that is made while another one is."""
    model, pipe = both()
    seen: list[list[str]] = []

    def hook(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
        seen.append(list(state))
        if len(seen) == 1:
            module.state_dict()
        del state[seen[0][0]]

    pipe.register_state_dict_post_hook(hook)
    found = list(pipe.state_dict())
    assert seen == [list(model.state_dict())] * 2
    assert found == seen[0][1:]


@pytest.mark.parametrize("copied", [False, True])
def test_names_of_the_model_lead_to_its_modules_and_tensors(copied):
    model, pipe = both()
    pipe = copy.deepcopy(pipe) if copied else pipe
    for name, tensor in pipe.named_parameters(remove_duplicate=False):
        assert pipe.get_parameter(name) is tensor
    block = pipe.get_submodule("h.0")
    theirs = [name for name, _ in model.h[0].named_parameters()]
    assert sorted(name for name, _ in block.named_parameters()) == sorted(theirs)
    assert pipe.get_submodule("h.0.norm") is block.norm
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pipe.nothing  # noqa: B018


def test_distributed_checkpoints_take_a_pipe_as_they_take_the_model():
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, pipe = both()
    optimizer = torch.optim.AdamW(pipe.parameters())
    for parameter in pipe.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved, state = get_state_dict(pipe, optimizer)
    assert saved.keys() == model.state_dict().keys()
    _, other = both(1)
    set_state_dict(
        other, torch.optim.AdamW(other.parameters()), model_state_dict=saved, optim_state_dict=state
    )
    assert all(torch.equal(t, saved[name]) for name, t in other.state_dict().items())


def test_load_hooks_of_inlined_modules_run_where_the_pipe_loads():
    def rename(state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", "a.")] = state.pop(key)

    inner, model = Pair(), nn.Sequential(nn.Linear(4, 4))
    inner._register_load_state_dict_pre_hook(rename)
    model.append(inner)
    layers = sequential(model, torch.rand(3, 4))
    assert len(layers) == 3
    state = {
        key.replace("1.a", "1.old"): torch.rand_like(v) for key, v in layers.state_dict().items()
    }
    layers.load_state_dict(state)
    assert torch.equal(inner.a.weight, state["1.old.weight"])


class FrozenConfig(OrderedDict):  # type: ignore[type-arg]
    """As diffusers has it."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("this config is frozen")

    __setitem__ = setdefault = pop = update


def test_a_config_that_refuses_changes_stays_what_it_is():
    model, config = Pair(), FrozenConfig()
    OrderedDict.__setitem__(config, "width", 4)
    model.config = config
    pipe = Pipe(sequential(model, torch.rand(3, 4)), [1, 1], devices=["cpu:0", "cpu:1"])
    assert verify(pipe, torch.rand(3, 4), loss_fn=torch.mean).ok
    assert dict(model.config) == {"width": 4}


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


# --- a sample of evaluation ----------------------------------------------------------------------


class MayLose(nn.Module):
    """Returns a loss for each sample if there are labels, as many models of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, label: Tensor | None = None, *, scaled: bool = False) -> Tensor:
        logits = self.head(self.body(x))
        if label is not None:
            return F.cross_entropy(logits, label, reduction="none")
        return 2 * logits if scaled else logits


@pytest.mark.parametrize(
    "sample", [lambda x: (x,), lambda x: {"x": x}, lambda x: {"x": x, "scaled": True}]
)
def test_evaluation_may_have_arguments_of_its_own(sample):
    model, x, label = MayLose(), torch.randn(7, 6), torch.randint(3, (7,))
    scaled = "scaled" in sample(x)
    flags = {"scaled": True} if scaled else {}
    layers = sequential(model, x[:5], label[:5], eval_sample=sample(x[:5]))
    pipe = Pipe(layers, "parameters", devices=["cpu:0", "cpu:1"], chunks=2)
    assert pipe(x, label).shape == (7,)
    assert verify(pipe, (x, label), loss_fn=torch.mean).ok
    wanted = copy.deepcopy(model).eval()(x, **flags).detach()
    given = {"x": x, **flags}
    assert torch.equal(pipe.eval_batch(given), wanted)
    loss = pipe.eval_batch(given, label, loss_fn=F.cross_entropy)
    assert_close(loss, F.cross_entropy(wanted, label))
    pipe.eval()
    assert torch.equal(pipe(x, **flags), wanted)
    assert torch.equal(copy.deepcopy(pipe)(x, **flags), wanted)
    with pytest.raises(ValueError, match="sample for evaluation in which label is None"):
        pipe(x, label)
    with pytest.raises(ValueError, match="sample for training in which label is a tensor"):
        pipe.train()(x)


@pytest.mark.parametrize(
    ("sample", "error", "said"),
    [
        (lambda x, label: x, TypeError, "eval_sample is a Tensor: give the arguments of a call"),
        (lambda x, label: (x[:, :2],), ValueError, r"has x=float32\[5, 2\], and the sample float"),
        (lambda x, label: (x, label), ValueError, r"has label=int64\[5\], and the sample no such"),
        (lambda x, label: (x, None, 3), TypeError, "too many positional arguments"),
    ],
)
def test_samples_of_evaluation_that_do_not_fit_are_refused(sample, error, said):
    x, label = torch.randn(5, 6), torch.randint(3, (5,))
    with pytest.raises(error, match=said):
        sequential(MayLose(), x, eval_sample=sample(x, label))


# --- what libraries ask of values -----------------------------------------------------------------


def test_checks_of_values_stay_in_the_layers():
    """As the multimodal models of transformers check the number of image tokens."""

    def checked(m, x):
        torch._check_tensor_all(x.abs() < 9)
        return torch.tanh(x)

    layers = sequential(Pair(checked), x := torch.randn(3, 4) / 9)
    assert len(layers) == 2
    layers(x)
    with pytest.raises(RuntimeError):
        layers(x + 1e6)


@pytest.mark.parametrize("mask", [None, 2.0])
def test_what_is_wrong_only_as_if_compiled_is_traced_as_it_is(mask):
    """LongT5 of transformers makes no mask while it is compiled, PaliGemma another one."""

    def masked(m, x):
        return x * (mask if torch.compiler.is_compiling() else torch.ones_like(x))

    layers = sequential(model := Pair(masked), x := torch.randn(3, 4))
    assert len(layers) == 2
    assert torch.equal(layers(x), model(x))


def test_a_decision_by_a_mask_that_was_cast_to_the_type_of_what_layers_compute():
    """Longformer makes its mask of the type of the embeddings, and asks whether any is global."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, ids):
            x = torch.tanh(self.embedding(ids))
            ignored = (ids[:, :, None] > 7).to(x.dtype).expand(x.shape)
            if (ignored > 0).any().item():
                x = x * (1 - ignored)
            return self.out(x)

    layers = sequential(model := Masked(), torch.randint(7, (4, 5)))
    assert len(layers) == 2
    ids = torch.randint(7, (6, 5))
    assert torch.equal(layers(ids), model(ids))
    with pytest.raises(ValueError, match=r"if \(ignored > 0\)\.any\(\)\.item\(\):"):
        layers(torch.full((6, 5), 8))


def test_an_encoder_and_a_decoder_that_decide_by_sizes_are_cut_into_their_blocks():
    """Neither has most of the model, so both were one layer."""

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()) for _ in range(3)
            )

        def forward(self, x, given=None):
            if given is not None and (x.size(1) == 1 or x.size(1) == given.size(1)):
                x = x + given
            for block in self.blocks:
                x = block(x)
            return x

    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Blocks(), Blocks()

        def forward(self, x, y):
            return self.decoder(y, self.encoder(x))

    sample = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    layers = sequential(model := Translator(), *sample)
    assert not layers.whole
    assert len(layers) >= 18
    x, y = torch.randn(6, 7, 4), torch.randn(6, 7, 4)  # of another length, with the same decision
    assert torch.equal(layers(x, y), model(x, y))
    with pytest.raises(ValueError, match=r"x\.size\(1\) == given\.size\(1\)"):
        layers(torch.randn(6, 7, 4), torch.randn(6, 3, 4))
