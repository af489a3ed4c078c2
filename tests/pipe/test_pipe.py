"""``Pipe`` as a module (P3): what it takes, shows and refuses; its setters, layers and schedule."""

from __future__ import annotations

import copy
import inspect
import io
import operator
import pickle
import re
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from syncpipe import LayerSpec, Pipe, TiedLayerSpec, Worker
from syncpipe.schedules import Schedule, gpipe, one_f_one_b
from tests.support import accelerator as acc
from tests.support.models import (
    CHECKPOINT_MODES,
    assert_equals_plain,
    assert_same,
    linear_model,
    named_model,
    step,
)
from tests.support.training import FOUR


def made(*args: Any, **arguments: Any) -> Pipe:
    return Pipe(linear_model(4), *args, **arguments)


# --- attributes ------------------------------------------------------------------------------


def test_attributes_are_what_was_given():
    pipe = made((1, 3), devices=["cpu:1", "cpu:0", "cpu:5"], chunks=3, checkpoint="always")
    assert pipe.balance == [1, 3]
    assert pipe.devices == [torch.device("cpu", 1), torch.device("cpu", 0)], "unused one is dropped"
    assert (pipe.chunks, pipe.checkpoint) == (3, "always")
    pipe = made([2, 2])
    assert (pipe.chunks, pipe.checkpoint) == (1, "except_last")


@pytest.mark.parametrize("name", ["balance", "devices", "replicas", "partitions"])
def test_a_list_that_a_pipe_shows_refuses_to_be_changed_in_place(name):
    pipe = made([2, 2])
    found, before = getattr(pipe, name), list(getattr(pipe, name))
    edits = [
        lambda: found.append(before[0]), lambda: found.__setitem__(0, before[1]), found.clear,
        lambda: operator.iadd(found, before), lambda: operator.delitem(found, 0), found.reverse,
    ]  # fmt: skip
    for edit in edits:
        with pytest.raises(TypeError, match=rf"pipe\.{name} cannot be changed in place.*= "):
            edit()
    assert getattr(pipe, name) == before
    file = io.BytesIO()
    torch.save(list(found) if name == "partitions" else found, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=name != "partitions")
    assert type(loaded) is type(copy.copy(found)) is list
    assert len(loaded) == 2


SET_IN_A_CONSTRUCTOR = {
    "deferred_batch_norm": True, "unpack": True, "seed": 1, "init_fn": print, "sample": 0,
    "module": [], "partitions": [],
}  # fmt: skip


@pytest.mark.parametrize("name", inspect.signature(Pipe).parameters)
def test_an_argument_of_a_pipe_is_an_attribute_or_says_that_it_is_none(name):
    pipe = made([2, 2])
    if name not in SET_IN_A_CONSTRUCTOR:
        setattr(pipe, name, getattr(pipe, name))
        return
    with pytest.raises(AttributeError, match=rf"pipe\.{name} = .* would do nothing: .*pipe"):
        setattr(pipe, name, SET_IN_A_CONSTRUCTOR[name])
    model = nn.Sequential(OrderedDict({name: nn.Tanh()}))  # a layer may have such a name
    setattr(pipe := Pipe(model, [1]), name, nn.Sigmoid())
    assert torch.equal(pipe(torch.zeros(1)), torch.tensor([0.5]))


def test_slots_are_set_and_chosen_with_the_schedule():
    pipe = four_stages(**NEVER)
    assert pipe.slots is None
    pipe.slots = "textbook"
    assert pipe.slots == "textbook"
    assert rows_of(pipe) == rows_of(four_stages(slots="textbook", **NEVER))
    with pytest.raises(ValueError, match=r"slots=\(2, 1\).* 4 stages"):
        pipe.slots = [2, 1]
    assert pipe.slots == "textbook"
    pipe.slots = None
    assert pipe.schedule == "1f1b"
    pipe.schedule = "gpipe"
    with pytest.raises(ValueError, match="only schedule='1f1b' has slots"):
        pipe.slots = [4, 3, 2, 1]


def test_layers_and_partitions_are_those_of_the_sequential():
    model = named_model()
    pipe = Pipe(model, [1, 3])
    assert all(isinstance(partition, nn.Sequential) for partition in pipe.partitions)
    assert [list(p._modules) for p in pipe.partitions] == [["stem"], ["act", "norm", "fc"]]
    assert [layer for partition in pipe.partitions for layer in partition] == list(model)
    assert (len(pipe), list(pipe), pipe.fc) == (4, list(model), model.fc)
    assert [pipe[k] for k in range(-4, 4)] == [model[k] for k in range(-4, 4)]
    part = pipe[1:-1]
    assert type(part) is nn.Sequential
    assert dict(part.named_children()) == dict(model[1:-1].named_children())
    for index in 4, -5:
        with pytest.raises(IndexError, match=f"layer {index} .*4"):
            pipe[index]
    for named in nn.Module.named_children, nn.Module.named_parameters, nn.Module.named_modules:
        assert [name for name, _ in named(pipe)] == [name for name, _ in named(model)]
    pipe, x = made([2, 2]), torch.randn(2, 3)
    first, second = pipe.partitions  # can be called by hand
    assert torch.equal(second(first(x)), nn.Sequential(*pipe)(x))


def test_print_shows_stages_devices_and_layers():
    shown = repr(Pipe(named_model(), [1, 3], devices=["cpu:0", "cpu:1"], chunks=7))
    for text in ("[1, 3]", "chunks=7", "except_last", "stage 1", "cpu:1", "(norm): BatchNorm1d(3"):
        assert text in shown
    places = [shown.index(text) for text in ("stage 0", "cpu:0", "stem", "stage 1", "cpu:1", "fc")]
    assert places == sorted(places)
    assert "schedule" not in shown
    shown = repr(four_stages(slots=[4, 3, 2, 1], **NEVER)).splitlines()[0]
    assert shown.endswith("checkpoint='never', schedule=partial(one_f_one_b, slots=(4, 3, 2, 1))")


def test_an_empty_pipe_is_the_identity():
    pipe, x = Pipe(nn.Sequential(), [], chunks=3), torch.randn(2, 3, requires_grad=True)
    assert (len(pipe), pipe.balance, pipe.partitions, list(pipe)) == (0, [], [], [])
    tree = (x, {"a": None})
    assert pipe(tree) == tree
    pipe(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3))


# --- refusals --------------------------------------------------------------------------------


class OwnForward(nn.Sequential):
    def forward(self, input: Any) -> Any:
        return super().forward(input) + 1


class OwnCall(nn.Sequential):
    def __call__(self, input: Any) -> Any:
        return super().__call__(input) + 1


def seen_by_nobody(register: Any) -> nn.Sequential:
    """Layers in a container with something that a pipe would leave out."""
    module = linear_model(4)
    register(module, lambda *_: None)
    return module


MODES = ".*".join(f"{mode!r}" for mode in CHECKPOINT_MODES)


@pytest.mark.parametrize(
    ("arguments", "error", "shown"),
    [
        *[({"balance": balance}, ValueError, f"balance.*{shown}") for balance, shown in (
            ([2, 1], r"\[2, 1\].*3.*4"), ([2, 2, 1], r"\[2, 2, 1\].*5.*4"), ([], r"\[\].*0.*4"),
            ([4, 0], r"\[4, 0\].*at least one"), ([5, -1], r"\[5, -1\].*at least one"),
            ("22", "'22'.*parameters"),
        )],
        ({"balance": [2, 2.0]}, TypeError, r"balance.*integers.*2\.0"),
        ({"balance": 4}, TypeError, "balance.*list.*4"),
        ({"devices": ["cpu:0"]}, IndexError, r"2 partitions.*1 devices.*cpu:0"),
        ({"devices": FOUR[:2], "balance": [1] * 4}, IndexError, r"4 partitions.*2 devices.*cpu:0"),
        ({"devices": "cpu"}, TypeError, "devices.*list.*'cpu'"),
        ({"devices": torch.device("cpu")}, TypeError, "devices.*list"),
        ({"devices": ["cpu", 1.5]}, TypeError, r"devices.*1\.5"),
        ({"devices": ["cpu", True]}, TypeError, "devices.*True"),
        *[({"devices": ["cpu", no]}, ValueError, f"devices.*{no}")
          for no in ("gpu:0", "cuda:99", -2)],
        *[({"chunks": n}, ValueError, f"chunks={n}.*at least 1") for n in (0, -1)],
        *[({"chunks": n}, TypeError, f"chunks={re.escape(repr(n))}.*integer")
          for n in (1.0, "2", None, True, torch.tensor(2.5))],
        *[({"checkpoint": mode}, ValueError, re.escape(f"checkpoint={mode!r}") + f".*{MODES}")
          for mode in ("allways", "", None, True, ["nevr"], ["never", "sometimes"])],
        *[({"module": linear_model(6), "balance": [4, 2], "checkpoint": mode}, ValueError, shown)
          for mode, shown in (
            ([0, 6], "6 is no layer; there are 6, from 0"),
            ([0, -7], "-7 is no layer"),
            ([1, 1], "a layer is in it twice"),
            ([(0, 1), 1], "a layer is in it twice"),
            ([(0, 2)], r"\(0, 2\) are no layers one after another"),
            ([True, False], "one bool for each of the 6 layers"),
            ([True, 1, 2], "one bool for each of the 6 layers"),
            (["never", [0]], "stage 1 has the layers 4 to 5"),
            (["never", ["never", [0]]], "is not one of 'always'"),
            ([[0], "never", "never"], "has 3 modes, but there are 2 stages"),
            (lambda layer: isinstance(layer, nn.Conv2d), "no layer of the model fulfils it"),
            (["never", lambda layer: False], "no layer of stage 1 fulfils it"),
            *[(none, "a function .* a list of layers") for none in (nn.Linear, [1.5], [()], 3)],
        )],
        *[({"devices": devices, "replicas": replicas}, error, shown)
          for devices, replicas, error, shown in (
            (FOUR, [2, 1], ValueError, r"replicas=\[2, 1\] need 3 devices.*4 are given"),
            (FOUR[:2], [2, 1], ValueError, r"need 3 devices.*2 are given: cpu:0, cpu:1"),
            (FOUR, [2, 1, 1], ValueError, r"has 3 numbers, but balance has 2 partitions"),
            (FOUR[:2], [2, 0], ValueError, r"replicas=\[2, 0\].*at least 1"),
            (FOUR[:2], 0, ValueError, r"replicas=0.*at least 1"),
            *[(FOUR[:2], no, TypeError, f"replicas={no!r}.*integer") for no in (True, 2.0, "2")],
            (FOUR, 3, ValueError, r"replicas=\[3, 3\] need 6 devices.*4 are given"),
            (["cpu:0", *FOUR[:3]], 2, ValueError, r"replicas of stage 0 would"),
        )],
        ({"balance": "parameters", "devices": FOUR[:3], "replicas": 2}, ValueError,
         "3 devices cannot be divided by 2"),
        ({"balance": "parameters", "devices": FOUR[:3], "replicas": [2, 1]}, ValueError,
         "makes stages that are alike, but replicas"),
        ({"balance": None, "replicas": 2}, ValueError,
         r"replicas=2 needs balance=\[...\] and devices"),
        ({"checkpoint": ["never"] * 3}, ValueError, r"has 3 modes.*2 stages"),
        ({"schedule": "gpip"}, ValueError, "did you mean 'gpipe'"),
        ({"schedule": 3}, TypeError, "schedule=3"),
        ({"slots": [2, 1, 1]}, ValueError, r"slots=\(2, 1, 1\).* 2 stages"),
        ({"slots": "some"}, ValueError, "slots='some'"),
        ({"slots": 3}, ValueError, "slots=3"),
        ({"slots": {0: 1}}, ValueError, "slots={0: 1}"),
        ({"schedule": "gpipe", "slots": "textbook"}, ValueError, "only schedule='1f1b' has slots"),
        *[({"module": no}, TypeError, rf"nn\.Sequential.*not {type(no).__name__}")
          for no in (nn.Linear(2, 2), nn.ModuleDict({"a": nn.ReLU()}), None)],
        *[({"module": seen_by_nobody(register)}, ValueError, "which a pipe would not run")
          for register in (
            nn.Module.register_full_backward_pre_hook, nn.Module.register_state_dict_post_hook,
            nn.Module.register_load_state_dict_pre_hook,
            nn.Module.register_load_state_dict_post_hook,
            lambda module, _: setattr(module, "_compiled_call_impl", module.forward),
        )],
        ({"module": OwnForward(nn.Linear(2, 2))}, TypeError, r"OwnForward.*forward of its own"),
        ({"module": OwnCall(nn.Linear(2, 2))}, TypeError, r"OwnCall.*__call__ of its own"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_value(arguments, error, shown):
    name = [*arguments][-1]
    arguments = {"module": linear_model(4), "balance": [2, 2], **arguments}
    with pytest.raises(error, match=shown):
        Pipe(**arguments)
    if name not in ("balance", "devices", "chunks", "checkpoint"):
        return  # those can be set, too
    value, x = arguments.pop(name), torch.randn(4, 3)
    pipe = Pipe(**{"balance": [2, 2], **arguments})
    before, state = pipe(x), repr(pipe)
    with pytest.raises(error, match=shown):
        setattr(pipe, name, value)
    assert repr(pipe) == state
    assert torch.equal(pipe(x), before)


# --- a module --------------------------------------------------------------------------------


def test_layers_named_like_attributes_of_a_pipe_keep_their_names():
    names = ["balance", "devices", "chunks", "partitions", "forward"]
    model = nn.Sequential()
    model._modules.update({name: nn.Linear(3, 3) for name in names})
    pipe = assert_equals_plain(model, torch.randn(2, 3), [2, 3])
    assert [name for name, _ in pipe.named_children()] == names


def _saved(pipe: Pipe) -> Pipe:
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe)), _saved]


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("accelerators", marks=pytest.mark.gpu)])
def test_a_copy_is_independent_and_computes_the_same(way, used, kind):
    devices: list[Any] = ["cpu:1", "cpu:0"]
    if kind == "accelerators":
        devices = [acc.device(1), Worker(acc.device(0))]
    pipe = Pipe(named_model(), [2, 2], chunks=2, checkpoint="always", devices=devices)
    x = torch.randn(4, 3, device=pipe.devices[0], requires_grad=True)
    if used:
        pipe.train_batch(x, loss_fn=torch.mean)  # has threads now
        pipe.zero_grad()
    twin = way(pipe)
    assert (repr(twin), twin.devices) == (repr(pipe), pipe.devices)
    assert_same(step(twin, twin, x), step(pipe, pipe, x))
    assert_same(*[each.train_batch(x, loss_fn=torch.mean) for each in (twin, pipe)])
    with torch.no_grad():
        twin.fc.weight.zero_()
    assert pipe.fc.weight.any()
    assert [p.fc for p in twin.partitions[1:]] == [twin.fc]
    twin[0] = nn.Identity()
    assert isinstance(pipe[0], nn.Linear)


# --- another layer in the place of one -------------------------------------------------------


def five(**options: Any) -> Pipe:
    return Pipe(linear_model(5), [2, 1, 2], chunks=2, **options)


def test_a_layer_is_replaced_in_its_stage_under_its_name():
    pipe, plain, x = five(), linear_model(5), torch.randn(4, 3)
    plain.load_state_dict(pipe.state_dict())
    names, optimizer = list(pipe._modules), torch.optim.SGD(pipe.parameters(), lr=0.1)
    for index in (2, -1):
        pipe[index] = plain[index] = nn.Linear(3, 3)
        optimizer.add_param_group({"params": plain[index].parameters()})
    assert (pipe.balance, list(pipe._modules)) == ([2, 1, 2], names)
    torch.testing.assert_close(pipe(x), plain(x))
    pipe.load_state_dict(plain.state_dict())
    before = [p.clone() for p in pipe.parameters()]
    pipe.train_batch(x, loss_fn=torch.mean)
    optimizer.step()  # the others kept their parameters
    assert not any(torch.equal(p, q) for p, q in zip(pipe.parameters(), before, strict=True))


@pytest.mark.parametrize("how", [setattr, nn.Module.set_submodule])
def test_a_layer_that_is_replaced_by_name_is_the_one_that_runs(how):
    pipe, x, new = Pipe(named_model(), [2, 2], chunks=2), torch.randn(4, 3), nn.Linear(3, 5)
    pipe(x)
    how(pipe, "fc", new)
    assert pipe(x).shape == (4, 5)
    assert pipe.partitions[1].fc is new


def _deleted_and_set(pipe: Pipe, layer: nn.Module) -> None:
    del pipe.fc
    pipe.fc = layer


REPLACED = {
    "setattr": lambda pipe, layer: setattr(pipe, "fc", layer),
    "index": lambda pipe, layer: operator.setitem(pipe, -1, layer),
    "add_module": lambda pipe, layer: pipe.add_module("fc", layer),
    "set_submodule": lambda pipe, layer: pipe.set_submodule("fc", layer),
    "modules": lambda pipe, layer: operator.setitem(pipe._modules, "fc", layer),
    "deleted and set": _deleted_and_set,
}
SETTINGS = {
    "devices": ["cpu:1", "cpu:0"], "replicas": [1, 1], "schedule": "gpipe", "balance": [1, 3],
    "checkpoint": "never", "chunks": 2, "slots": None,
}  # fmt: skip


@pytest.mark.parametrize("way", REPLACED)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_layer_that_was_replaced_stays_when_something_is_set(way, setting):
    pipe, x, new = Pipe(named_model(), [2, 2], chunks=2).eval(), torch.randn(4, 3), nn.Linear(3, 5)
    pipe(x)
    REPLACED[way](pipe, new)
    setattr(pipe, setting, SETTINGS[setting])
    torch.testing.assert_close(pipe(x), nn.Sequential(*pipe)(x))
    assert list(pipe)[-1] is pipe.fc is pipe.partitions[-1].fc is new
    assert pipe.state_dict()["fc.weight"].shape == (5, 3)


IN_A_PARTITION = {
    "index": lambda part, layer: operator.setitem(part, -1, layer),
    "setattr": lambda part, layer: setattr(part, "fc", layer),
    "modules": lambda part, layer: operator.setitem(part._modules, "fc", layer),
    "update": lambda part, layer: part._modules.update(fc=layer),
    "append": lambda part, layer: part.append(layer),
    "extend": lambda part, layer: part.extend([layer]),
    "add": lambda part, layer: operator.iadd(part, nn.Sequential(layer)),
    "del": lambda part, layer: operator.delitem(part, 0),
    "pop": lambda part, layer: part.pop(0),
    "set_submodule": lambda part, layer: part.set_submodule("fc", layer),
}


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("way", IN_A_PARTITION)
def test_layers_are_not_changed_in_a_partition(way, copied):
    pipe, x = Pipe(named_model(), [2, 2], chunks=2).eval(), torch.randn(4, 3)
    pipe = copy.deepcopy(pipe) if copied else pipe
    before, layers = pipe(x), list(pipe)
    with pytest.raises(TypeError, match=r"pipe\.partitions\[j\].*pipe\[k\] = layer"):
        IN_A_PARTITION[way](pipe.partitions[1], nn.Linear(3, 2))
    assert list(pipe) == [layer for part in pipe.partitions for layer in part] == layers
    assert torch.equal(pipe(x), before)


@pytest.mark.parametrize("value", [nn.Parameter(torch.ones(())), lambda input: input])
def test_what_a_partition_would_not_use_is_refused(value):
    pipe, x = made([2, 2]), torch.randn(4, 3)
    name = "forward" if callable(value) else "scale"
    setattr(pipe.partitions[1], name, value)
    with pytest.raises(ValueError, match=rf"partitions\[1\] has {name} of its own"):
        pipe(x)
    delattr(pipe.partitions[1], name)
    pipe(x)


def test_a_spec_that_was_put_in_by_name_is_refused_until_it_is_built():
    pipe, x = Pipe(named_model(), [2, 2]), torch.randn(4, 3)
    spec = LayerSpec(nn.Linear, 3, 5)
    pipe.add_module("fc", spec)
    for call in (lambda: pipe(x), lambda: setattr(pipe, "devices", FOUR)):
        with pytest.raises(ValueError, match=r"pipe\.fc is a LayerSpec.*pipe\[3\] = "):
            call()
    pipe[3] = spec
    assert pipe(x).shape == (4, 5)


def test_a_normalisation_that_was_put_into_a_layer_is_deferred_as_well():
    pipe = Pipe(
        nn.Sequential(nn.Sequential(nn.Linear(3, 3))), [1], chunks=2, deferred_batch_norm=True
    )
    pipe(x := torch.randn(4, 3))
    pipe[0].append(nn.BatchNorm1d(3))
    pipe(x)
    assert pipe[0][1].num_batches_tracked == 1


def test_new_layers_are_of_all_kinds_and_go_to_the_device_of_their_stage():
    pipe = Pipe(linear_model(2), [1, 1], devices=["cpu", "meta"])
    pipe[1], pipe[0] = nn.Linear(3, 3), LayerSpec(nn.Linear, 3, 3)
    assert [layer.weight.device.type for layer in pipe] == ["cpu", "meta"]
    pipe = five()
    pipe[0], pipe[2], pipe[4] = torch.tanh, LayerSpec(nn.ReLU), LayerSpec(nn.Linear, 3, 2)
    found = [type(layer).__name__ for layer in pipe]
    assert found == ["Function", "Linear", "ReLU", "Linear", "Linear"]
    assert pipe(torch.randn(4, 3)).shape == (4, 2)
    pipe = Pipe(linear_model(2), [1, 1], chunks=2, deferred_batch_norm=True)
    pipe[1] = LayerSpec(nn.BatchNorm1d, 3)
    pipe(torch.randn(4, 3))
    assert pipe[1].num_batches_tracked == 1


def test_a_new_layer_shares_what_its_key_says():
    pipe = Pipe([TiedLayerSpec("a", nn.Linear, 3, 3), nn.ReLU(), nn.ReLU()], [2, 1])
    weight = pipe[0].weight
    pipe[2] = TiedLayerSpec("a", nn.Linear, 3, 3)
    assert pipe[2].weight is weight
    pipe[2].weight = nn.Parameter(torch.ones(3, 3))
    pipe[1] = LayerSpec(nn.ReLU)
    assert pipe[2].weight is not pipe[0].weight  # a tie that was undone stays undone


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise KeyError("mine")


@pytest.mark.parametrize(
    ("edit", "kind", "message"),
    [
        (lambda p: p.__setitem__(1, nn.ReLU), TypeError, "new layer 1 is the class ReLU"),
        (lambda p: p.__setitem__(1, None), TypeError, "new layer 1 is a NoneType"),
        (lambda p: p.__setitem__(5, nn.ReLU()), IndexError, "layer 5 does not exist.*has 5"),
        (lambda p: p.__setitem__(slice(2), nn.ReLU()), TypeError, "slice"),
        (lambda p: p.__setitem__(0, LayerSpec(Failing)), KeyError, "mine"),
        (lambda p: p.append(nn.ReLU()), AttributeError, "another Pipe of the layers"),
        (lambda p: p.pop(), AttributeError, r"layers = \[\*pipe\]"),
    ],
)
def test_an_edit_that_is_refused_changes_nothing(edit, kind, message):
    pipe, x = five(checkpoint=["always", "never", "never"]), torch.randn(4, 3)
    before, output = (pipe.balance, pipe.devices, list(pipe), list(pipe._modules)), pipe(x)
    with pytest.raises(kind, match=message):
        edit(pipe)
    assert (pipe.balance, pipe.devices, list(pipe), list(pipe._modules)) == before
    assert torch.equal(pipe(x), output)


# --- a mode for each stage -------------------------------------------------------------------


def four_stages(**options: Any) -> Pipe:
    return made([1] * 4, chunks=4, **options)


def test_modes_and_slots_do_not_go_with_another_number_of_stages():
    for options, message in (
        ({"checkpoint": ["never"] * 4}, r"has 4 modes.*2 stages"),
        ({"slots": [4, 3, 2, 1], "checkpoint": "never"}, r"slots=\(4, 3, 2, 1\).*each of 2 stages"),
    ):
        pipe = four_stages(devices=FOUR, **options)
        with pytest.raises(ValueError, match=message):
            pipe.balance = [2, 2]
        assert pipe.balance == [1] * 4
        pipe.checkpoint, pipe.schedule = "never", "1f1b"
        pipe.balance = [2, 2]
        pipe.train_batch(torch.randn(8, 3), loss_fn=torch.mean)


# --- the schedule of a pipe ------------------------------------------------------------------


def rows_of(pipe: Pipe, **options: Any) -> list[list[tuple[str, int]]]:
    """For each stage its actions in order, as they were traced."""
    with pipe.trace() as trace:
        pipe.train_batch(torch.randn(8, 3), loss_fn=torch.mean, **options)
    rows: list[list[tuple[str, int]]] = [[] for _ in pipe.balance]
    for span in sorted(trace.spans, key=lambda span: span.start):
        if span.kind in ("forward", "backward"):
            rows[span.j].append((span.kind, span.i))
    return rows


NEVER = {"devices": FOUR, "checkpoint": "never"}


@pytest.mark.parametrize(
    ("own", "asked"),
    [
        ({"schedule": "gpipe"}, {"schedule": "gpipe"}),
        ({"schedule": "1f1b", "slots": "textbook"}, {"slots": "textbook"}),
        ({"slots": "textbook"}, {"schedule": partial(one_f_one_b, slots="textbook")}),
        ({"slots": [4, 2, 2, 1]}, {"slots": [4, 2, 2, 1]}),
        ({"schedule": gpipe(4, 4)}, {"schedule": "gpipe"}),
    ],
)
def test_train_batch_uses_the_schedule_of_the_call_or_else_of_the_pipe(own, asked):
    pipe, expected = four_stages(**own, **NEVER), rows_of(four_stages(**NEVER), **asked)
    assert rows_of(pipe) == expected != rows_of(four_stages(**NEVER), schedule="naive")
    assert rows_of(four_stages(schedule="naive", **NEVER), **asked) == expected
    for way in COPIES[:2]:
        assert rows_of(way(pipe)) == expected
    pipe.schedule = "naive"  # and forgets slots
    assert pipe.schedule == "naive"
    assert rows_of(pipe) == rows_of(four_stages(**NEVER), schedule="naive")
    with pytest.raises(ValueError, match=r"slots=\[2, 1\].* 4 stages"):
        pipe.schedule = partial(one_f_one_b, slots=[2, 1])
    assert pipe.schedule == "naive"


def test_a_function_that_fails_loses_nothing():
    def mine(m: int, device_of: tuple[int, ...]) -> Schedule:
        raise ZeroDivisionError("its own")

    pipe, inputs = four_stages(**NEVER), iter([(torch.randn(2, 3), None)] * 4)
    pipe.train_batch(torch.randn(8, 3), loss_fn=torch.mean)
    before = [p.grad.clone() for p in pipe.parameters()]
    with pytest.raises(ZeroDivisionError, match="its own") as caught:
        pipe.train_batch(data_iter=inputs, loss_fn=lambda y, _: y.mean(), schedule=mine)
    [note] = caught.value.__notes__
    assert "mine, called with m=4, device_of=(0, 1, 2, 3)" in note
    assert all(torch.equal(p.grad, old) for p, old in zip(pipe.parameters(), before, strict=True))
    assert len(list(inputs)) == 4
    pipe.train_batch(torch.randn(8, 3), loss_fn=torch.mean)
