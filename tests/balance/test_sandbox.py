"""Profiling leaves no trace: the model, its gradients and all settings are as they were."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from syncpipe.balance import profile
from tests.support.interrupts import interrupt_next, interrupted
from tests.support.models import Counter, Noise, Receive, Send
from tests.support.running import Do, on_gradient, raising
from tests.support.untouched import snapshot

SHAPE = (4, 4, 3)


class Python(nn.Module):
    """Leaves attributes behind, and draws from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(random.gauss(0, 1))
        self.last = x
        return x * 1.5


class Fails(nn.Module):
    """Raises in forward, or in backward; has touched all that it can reach before."""

    def __init__(self, error: BaseException, when: str) -> None:
        super().__init__()
        self.error, self.when = error, when
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(True)
        random.random()
        y = torch.nn.functional.dropout(self.norm(x))
        if self.when == "forward":
            raise self.error
        return on_gradient(y, raising(lambda: self.error))


def layers() -> list[nn.Module]:
    frozen = nn.Linear(3, 3).requires_grad_(False)
    return [
        nn.Conv1d(4, 4, 1),
        nn.BatchNorm1d(4),
        Send(),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        Counter(),
        frozen,
        Python(),
        Noise(),
        Receive(),
        nn.Linear(3, 3).eval(),
    ]


def trained(*modules: nn.Module) -> nn.Sequential:
    """A model with gradients, statistics and hooks."""
    model = nn.Sequential(*modules)
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: None)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    return model


def untouched(
    model: nn.Sequential,
    error: type[BaseException] | None = None,
    run: Callable[..., Any] = profile,
    **options: Any,
) -> Any:
    """The profile of a model, which with all else is as it was before."""
    torch.set_autocast_cache_enabled(True)
    sample, result = torch.rand(SHAPE, requires_grad=True), None
    before = snapshot(model, sample, versions=True)
    with nullcontext() if error is None else pytest.raises(error):
        result = run(model, sample, **{"timeout": 0.0, "sizes": [4], **options})
    after = snapshot(model, sample, versions=True)
    assert [what for what in before | after if after.get(what) != before.get(what)] == []
    return result


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_profile_leaves_everything_as_it_was(mode: Any, device: str | None) -> None:
    """And gradients are measured whatever the caller has switched off."""
    model = trained(*layers())
    with mode():
        found = untouched(model, timeout=0.01, threads=2, device=device, sizes=None)
    assert found.layers[0].stored_bytes[4] > 0
    assert (found.layers[0].backward[4] > 0) == (device != "meta")


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("error", [ZeroDivisionError("by hand"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", [0, 5, len(layers())])
def test_an_exception_in_any_layer(place: int, error: BaseException, when: str) -> None:
    modules = layers()
    modules.insert(place, Fails(error, when))
    with torch.no_grad():
        untouched(trained(*modules), type(error), threads=2)


# A destructor, or the callback of a weak reference, cannot pass an exception on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_place() -> None:
    model = trained(*layers())

    def at_place(at: int) -> tuple[int, bool]:
        def run(model: nn.Sequential, x: Tensor, **options: Any) -> tuple[int, bool]:
            return interrupted(at, lambda: profile(model, x, threads=2, **options))

        found: tuple[int, bool] = untouched(model, run=run)
        return found

    at_place(0)  # imports what is imported late
    calls, _ = at_place(0)
    places = range(1, calls, max(1, calls // 60))
    stopped = [at_place(at)[1] for at in places]
    assert sum(stopped) > 0.9 * len(places)


def test_modes_that_ctrl_c_left_on_are_taken_off() -> None:
    def interrupt(x: Tensor) -> None:
        """Ctrl-C comes before modes are taken off again, or on again."""
        TorchDispatchMode().__enter__()
        TorchFunctionMode().__enter__()
        with _pop_mode_temporarily():
            interrupt_next()

    modules = layers()
    modules.insert(1, Do(interrupt))
    untouched(trained(*modules), KeyboardInterrupt, threads=2)


# --- copies -------------------------------------------------------------------------------------


def test_layers_that_cannot_be_copied() -> None:
    locked, tied = nn.Linear(3, 3), nn.Linear(3, 3)
    locked.lock = threading.Lock()
    tied.forward = lambda x: x @ tied.weight  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"layer '1' \(Linear\) cannot be copied.*__deepcopy__"):
        profile(nn.Sequential(nn.ReLU(), locked), torch.rand(SHAPE))
    with pytest.raises(TypeError, match="refers to the original module"):
        profile(nn.Sequential(tied), torch.rand(SHAPE))


def _old(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in use
        return norm(nn.Linear(3, 3))


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: _old(nn.utils.weight_norm),
        lambda: _old(nn.utils.spectral_norm),
        lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda: nn.Sequential(nn.Flatten(0, 1), nn.GRUCell(3, 5)),
    ],
    ids=["weight_norm", "spectral_norm", "new_weight_norm", "gru"],
)
def test_layers_with_weights_of_another_kind(
    layer: Callable[[], nn.Module], device: str | None
) -> None:
    model = trained(layer(), nn.ReLU())
    model(torch.rand(SHAPE))  # leaves a weight with a graph behind
    found = untouched(model, device=device)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert found.layers[0].parameter_bytes == size


def test_lazy_layers_stay_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    found = profile(model, torch.rand(4, 3), sizes=[2, 4], timeout=0.0)
    assert [layer.parameter_bytes for layer in found.layers] == [4 * 20, 4 * 10, 4 * 12]
    assert all(isinstance(p, nn.UninitializedParameter) for p in model.parameters())


def test_a_compiled_layer_runs_its_copy() -> None:
    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.forward = torch.compile(self.forward, backend="eager")  # type: ignore[method-assign]

    model = trained(Own(), torch.compile(nn.Linear(3, 3), backend="eager"))  # type: ignore[arg-type]
    found = untouched(model, time=False, device="meta")
    assert [layer.stored_bytes[4] for layer in found.layers] == [4 * 48, 4 * 48]


def test_a_parameter_keeps_its_class_and_attributes_but_no_gradient() -> None:
    class Special(nn.Parameter):
        pass

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Special(torch.ones(3))
            self.weight.role = "scale"

        def forward(self, x: Tensor) -> Tensor:
            assert self.training
            seen.append((type(self.weight), self.weight.role, self.weight.grad))
            return x * self.weight

    seen: list[Any] = []
    profile(trained(Asks().eval()), torch.rand(SHAPE), sizes=[4], time=False)
    assert seen == [(Special, "scale", None)]


def test_gradients_end_at_the_copies() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit
        scripted = torch.jit.script(nn.Linear(3, 3))
    closes = Do(lambda x: linear(x))  # by a function that knows the user's parameters
    closes.linear = linear = nn.Linear(3, 3)
    model = nn.Sequential(scripted, closes)
    profile(model, torch.randn(4, 3), timeout=0.0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
