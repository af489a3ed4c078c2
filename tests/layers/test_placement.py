"""Where the partitions of a pipe are: devices, workers, and moves that are refused."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from syncpipe import Pipe, Worker
from tests.support.compare import assert_same
from tests.support.models import linear_model

#: What moves or casts a module: whether it is refused, or the dtype that comes of it.
CALLS: dict[str, tuple[Callable[[nn.Module], Any], Any]] = {
    "cuda()": (lambda module: module.cuda(), "refused"),
    "to('meta')": (lambda module: module.to("meta"), "refused"),
    "to_empty": (lambda module: module.to_empty(device="cpu"), "refused"),
    "cpu()": (lambda module: module.cpu(), torch.float32),
    "to('cpu')": (lambda module: module.to("cpu"), torch.float32),
    "to(tensor)": (lambda module: module.to(torch.zeros(())), torch.float32),
    "float": (lambda module: module.float(), torch.float32),
    "share_memory": (lambda module: module.share_memory(), torch.float32),
    "to(dtype=)": (lambda module: module.to(dtype=torch.bfloat16), torch.bfloat16),
    "half": (lambda module: module.half(), torch.float16),
    "to('cpu', dtype)": (lambda module: module.to("cpu", torch.float64), torch.float64),
    "type": (lambda module: module.type(torch.float64), torch.float64),
}


@pytest.mark.parametrize("through_parent", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_move_is_refused_with_the_way_out_and_what_changes_no_device_works(
    name: str, through_parent: bool
) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), [1, 2])
    pipe(torch.randn(4, 3))  # whatever the pipe remembers must follow
    module = nn.Sequential(pipe, nn.Linear(2, 2)) if through_parent else pipe
    before = pipe.state_dict(keep_vars=True)
    values, (call, outcome) = copy.deepcopy(before), CALLS[name]
    if outcome == "refused":
        with pytest.raises(TypeError, match=r"Pipe.*devices"):
            call(module)
        outcome = torch.float32
    else:
        assert call(module) is module
    assert {p.dtype for p in pipe.parameters()} == {outcome}
    for key, tensor in pipe.state_dict(keep_vars=True).items() if outcome is torch.float32 else ():
        assert tensor is before[key]
        assert_same(tensor.detach(), values[key].detach(), key)
    output = pipe(torch.randn(4, 3, dtype=outcome))
    assert output.dtype == outcome
    output.sum().backward()
    assert all(p.grad.dtype == outcome for p in pipe.parameters())


def test_a_device_that_is_that_of_some_partitions_is_no_place_for_all() -> None:
    pipe = Pipe(linear_model(2), [1, 1], devices=["cpu", "meta"])
    for move in (lambda m: m.to("cpu"), lambda m: m.to("meta"), lambda m: m.to_empty(device="cpu")):
        with pytest.raises(TypeError, match="Pipe"):
            move(nn.ModuleList([pipe]))
    assert [p.device.type for p in pipe.parameters()] == ["cpu", "cpu", "meta", "meta"]


# --- balance=None ----------------------------------------------------------------------------


def placed(*where: str | None) -> nn.Sequential:
    """Linear layers on devices; None has no parameters, and "norm" has buffers alone, on meta."""
    norm = nn.BatchNorm1d(2, affine=False, device="meta")
    others: dict[str | None, nn.Module] = {None: nn.ReLU(), "norm": norm}
    return nn.Sequential(*[others.get(w) or nn.Linear(2, 2, device=w) for w in where])


@pytest.mark.parametrize(
    ("where", "balance", "devices"),
    [
        (["cpu", "meta"], [1, 1], ["cpu", "meta"]),
        (["cpu", "cpu", "meta"], [2, 1], ["cpu", "meta"]),
        (["cpu", "norm", None], [1, 2], ["cpu", "meta"]),
        (["cpu", None, "meta", None], [2, 2], ["cpu", "meta"]),
        ([None, None, "meta", "cpu"], [3, 1], ["meta", "cpu"]),
        (["cpu", None, "meta", "cpu"], [2, 1, 1], ["cpu", "meta", "cpu"]),
        ([], [], []),
    ],
)
def test_without_balance_consecutive_layers_on_one_device_form_a_partition(
    where: list[str | None], balance: list[int], devices: list[str]
) -> None:
    pipe = Pipe(placed(*where), chunks=2)
    assert pipe.balance == balance
    assert [device.type for device in pipe.devices] == devices


def test_a_layer_on_two_devices_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), placed("cpu", "meta"))
    with pytest.raises(ValueError, match=r"layer '1' \(Sequential\).*cpu.*meta"):
        Pipe(model)


@pytest.mark.parametrize("where", [["cpu"] * 5, [None] * 5])
@pytest.mark.parametrize("devices", [None, ["cpu:0", "cpu:1", "cpu:2"]])
def test_without_balance_and_placement_the_error_shows_code_that_works(
    where: list[str | None], devices: list[str] | None
) -> None:
    module = placed(*where)
    with pytest.raises(ValueError, match="balance is missing") as caught:
        Pipe(module, devices=devices)
    code = re.search(r"^ +(pipe = Pipe\(.*\))$", str(caught.value), re.MULTILINE)
    assert code, str(caught.value)
    scope: dict[str, Any] = {"Pipe": Pipe, "module": module}
    exec(code[1], scope)
    assert sum(scope["pipe"].balance) == 5
    assert len(scope["pipe"].balance) >= 2


# --- devices ---------------------------------------------------------------------------------


def test_without_an_accelerator_each_partition_gets_a_cpu_worker() -> None:
    pipe = Pipe(linear_model(3), [1, 1, 1])
    assert pipe.devices == [torch.device("cpu", j) for j in range(3)]
    pipe = Pipe(linear_model(2), [1, 1], devices=(f"cpu:{k}" for k in range(9)))
    assert pipe.devices == [torch.device("cpu", 0), torch.device("cpu", 1)]


def test_two_workers_on_one_device_run_on_two_threads_and_one_worker_on_none() -> None:
    def names(devices: list[Any]) -> set[int]:
        seen: set[int] = set()
        pipe = Pipe(linear_model(2), [1, 1], devices=devices, chunks=2)
        for layer in pipe:
            layer.register_forward_hook(lambda *_: seen.add(threading.get_ident()))
        pipe(torch.randn(4, 3))
        return seen

    mine = threading.get_ident()
    two = names([Worker("cpu"), Worker("cpu")])
    assert len(two) == 2
    assert mine not in two
    worker = Worker("cpu")
    assert names([worker, worker]) == {mine}
    assert names(["cpu:1", "cpu:1"]) == {mine}
    pipe = Pipe(linear_model(2), [1, 1], devices=[worker, worker])
    assert pipe.devices == [torch.device("cpu")] * 2
    assert torch.equal(copy.deepcopy(pipe)(x := torch.randn(4, 3)), pipe(x))
