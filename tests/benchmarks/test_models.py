"""``benchmarks.models``: the sizes that were published, and models that a pipe can cut anywhere."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import MODELS, PaperModel, amoebanetd, find, gpt2_small, unet, vgg16
from benchmarks.models.__main__ import COLUMNS, main
from benchmarks.models.amoebanet import (
    NORMAL,
    REDUCTION,
    CellKind,
    Halve,
    Leave,
    Reach,
    _operations,
)
from benchmarks.models.layers import Remember
from benchmarks.models.resnet import resnet
from benchmarks.models.transformer import Attention, transformer
from syncpipe import Pipe
from syncpipe.balance import profile
from syncpipe.skip import verify_skippables
from syncpipe.skip.layout import inspect_layout
from tests.support.models import assert_equals_plain

#: These take seconds, and have nothing in them that the smaller ones of their families have not.
LONG = {"AmoebaNet-D (72, 512)", "Transformer-415", "Transformer-1663"}
by_name = pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)


@functools.cache
def on_meta(entry: PaperModel) -> nn.Sequential:
    """Shared by the tests, which leave it as it is."""
    return entry.on_meta()


# -- the published sizes --------------------------------------------------------------------------


@by_name
def test_number_of_parameters_is_the_published_one(entry):
    count = sum(parameter.numel() for parameter in on_meta(entry).parameters())
    if entry.difference:
        assert entry.as_published(count) != entry.published, "there is no difference"
        assert count == pytest.approx(entry.published_count, rel=0.006)
    else:
        assert entry.as_published(count) == entry.published


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("ResNet-101", 44_549_160),
        ("ResNeXt-101 32x8d", 88_791_336),
        ("VGG-16", 138_357_544),
        ("GPT-2 small", 124_439_808 + 50_257 * 768),
        ("GPT-2 small, tied", 124_439_808),
    ],
)
def test_number_of_parameters_is_known_to_the_last_one(name, count):
    entry = find(name)
    assert entry.count(on_meta(entry)) == count


def test_rounding_keeps_the_published_digits():
    entry = PaperModel("", nn.Sequential, lambda *_: torch.ones(1), (), "7.80 B", "", "", extra=5)
    assert entry.published_count == 7.8e9
    assert entry.as_published(7_804_000_005) == "7.80 B"
    assert entry.as_published(7_806_000_005) == "7.81 B"


def test_table_has_a_line_for_each_model(capsys, monkeypatch):
    few = [entry for entry in MODELS if entry.name not in LONG]
    monkeypatch.setattr("benchmarks.models.__main__.MODELS", few)
    main()
    head, *lines = capsys.readouterr().out.splitlines()
    assert all(column in head for column in COLUMNS)
    for line, entry in zip(lines, few, strict=True):
        assert line.startswith(entry.name)
        assert entry.published in line
        assert entry.difference in line


def test_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(KeyError, match=r"no model 'AlexNet'.*VGG-16"):
        find("AlexNet")


# -- the real sizes, without values ---------------------------------------------------------------


@by_name
def test_each_skip_is_stashed_once_and_popped_once(entry):
    verify_skippables(on_meta(entry))


@pytest.mark.parametrize(
    "entry", [entry for entry in MODELS if entry.name not in LONG], ids=lambda entry: entry.name
)
def test_real_size_runs_on_meta(entry):
    output = on_meta(entry)(entry.sample(2, "meta"))
    assert output.shape == (2, *entry.output)


@pytest.mark.parametrize(
    "name",
    [
        "ResNet-101",
        "ResNeXt-101 32x8d",
        "U-Net (5, 64)",
        "AmoebaNet-D (18, 208)",
        "Transformer-13",
        "VGG-16",
        "GPT-2 small",
        "GPT-2 small, tied",
    ],
)
def test_planner_gets_sizes_of_every_layer(name):
    entry = find(name)
    model = on_meta(entry)
    measured = profile(model, entry.sample(4, "meta"), sizes=[4])
    assert len(measured.layers) == len(model)
    assert sum(layer.parameter_bytes for layer in measured.layers) == 4 * entry.count(model)
    assert measured.layers[-1].output_bytes[4] == 4 * 4 * math.prod(entry.output)


# -- small ones, in a pipe ------------------------------------------------------------------------


def pictures(side: int) -> Tensor:
    return torch.randn(4, 3, side, side)


def words() -> Tensor:
    return torch.randint(11, (4, 6))


TEXT = {"width": 8, "heads": 2, "vocabulary": 11, "length": 6}
# The model, its input, a balance with cuts in awkward places, the skips that pass over them.
SMALL: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], Tensor], list[int], int]] = {
    "resnet": (
        lambda: resnet((1, 2), channels=8, num_classes=5),
        lambda: pictures(32),
        [4, 6, 9],
        2,
    ),
    "resnext": (
        lambda: resnet((1, 1), channels=8, groups=4, group_width=16, num_classes=5),
        lambda: pictures(32),
        [5, 3, 6],
        2,
    ),
    "unet": (lambda: unet(2, 2, 4), lambda: pictures(16), [5, 6, 8], 2),
    "amoebanet": (lambda: amoebanetd(5, 3, 16), lambda: pictures(64), [20, 30, 33], 2),
    "transformer": (lambda: transformer(2, hidden=16, **TEXT), words, [2, 3, 2], 0),
    "vgg": (
        lambda: vgg16(5, image_size=32, channels=4, hidden=8, dropout=0.0),
        lambda: pictures(32),
        [9, 9, 4],
        0,
    ),
    "gpt2": (lambda: gpt2_small(layers=2, **TEXT), words, [2, 3, 2], 0),
    "gpt2_tied": (lambda: gpt2_small(tied=True, layers=2, **TEXT), words, [2, 3, 2], 1),
}


@pytest.mark.parametrize("family", SMALL)
def test_in_a_pipe_it_computes_the_same_bits(family):
    build, sample, balance, crossing = SMALL[family]
    torch.manual_seed(0)
    model = build()
    pipe = assert_equals_plain(
        model, sample(), balance, steps=2, chunks=2, devices=[f"cpu:{j}" for j in range(3)]
    )
    outgoing = inspect_layout([list(partition) for partition in pipe.partitions]).outgoing
    assert sum(map(len, outgoing)) == crossing


@pytest.mark.parametrize("family", ["unet", "amoebanet", "resnet"])
def test_every_cut_of_it_is_possible(family):
    build, sample, _, _ = SMALL[family]
    torch.manual_seed(0)
    model, x = build().eval(), sample()
    expected = model(x)
    for cut in range(1, len(model)):
        pipe = Pipe(model, [cut, len(model) - cut], devices=["cpu:0", "cpu:0"])
        torch.testing.assert_close(pipe(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (lambda: resnet((2, 3, 1)), 5 * 6 + 4),
        (lambda: unet(3, 4, 8), (2 * 3 + 1) * 4 + 4 * 3 + 1),
        (lambda: amoebanetd(10, 6, 8), 11 * (6 + 4) + 6),
        (lambda: transformer(5), 2 * 5 + 3),
        (lambda: gpt2_small(), 2 * 12 + 3),
        (lambda: vgg16(), 22),
    ],
)
def test_it_is_as_flat_as_documented(model, layers):
    with torch.device("meta"):
        assert len(model()) == layers


# -- that they are what they say ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [NORMAL, REDUCTION], ids=["normal", "reduction"])
def test_flattened_cell_computes_what_its_table_says(kind: CellKind):
    torch.manual_seed(0)
    layers = list(_operations(kind, 8))
    start = {0: torch.randn(2, 8, 8, 8), 1: torch.randn(2, 8, 8, 8)}
    flat = start
    for layer in layers:
        flat = layer(flat)
    operations = (layer.operation for layer in layers)
    states = dict(start)
    for target, pair in enumerate(kind.pairs, start=2):
        states[target] = sum(
            states[source] if name == "none" else next(operations)(states[source])
            for source, name in pair
        )
    assert set(flat) == set(kind.output)
    torch.testing.assert_close(flat, {state: states[state] for state in kind.output})


def test_states_of_a_cell_end_with_their_last_use():
    layers = list(_operations(REDUCTION, 8))
    states = {0: torch.randn(2, 8, 8, 8), 1: torch.randn(2, 8, 8, 8)}
    left = []
    for layer in layers:
        states = layer(states)
        left.append(set(states))
    assert left[1] == {1, 2}  # nothing but the two poolings uses state 0
    assert left[-1] == {4, 5, 6}


def test_block_adds_its_input():
    block = resnet((1,), channels=4)[2:7]
    _, *inside, add = block
    x = torch.rand(2, 4, 8, 8)
    expected = torch.relu(nn.Sequential(*inside)(x) + add.projection(x))
    torch.testing.assert_close(block(x), expected)


def test_stride_of_a_block_is_in_its_3x3():
    strides = [
        m.stride[0] for m in resnet((1, 1), channels=8)[8:11].modules() if hasattr(m, "stride")
    ]
    assert strides == [1, 2, 1]


def test_skip_of_unet_brings_what_the_bottom_does_not():
    model = unet(1, 1, 4)
    with torch.no_grad():
        model[3][0].weight.zero_()  # the convolution at the bottom
        assert not torch.equal(model(pictures(16)), model(pictures(16)))


def test_cell_reaches_back_over_one_cell():
    model = amoebanetd(5, 3, 8).eval()
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    for layer in model:
        if isinstance(layer, Reach):
            layer.squeeze.register_forward_hook(lambda _, args, __: inputs.append(args[0]))
        if isinstance(layer, (Remember, Leave)):
            layer.register_forward_hook(lambda *args: outputs.append(args[-1]))
    model(pictures(64))
    stem, *cells = outputs
    for before, expected in zip(inputs, [stem, stem, *cells[:-2]], strict=True):
        assert before is expected


def test_halving_looks_at_even_and_at_odd_pixels():
    x = torch.rand(1, 2, 4, 4, requires_grad=True)
    result = Halve(2, 6).eval()(x)
    assert result.shape == (1, 6, 2, 2)
    result.square().sum().backward()
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    assert torch.equal(x.grad[0, 0] != 0, rows % 2 == columns % 2)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_does_not_look_ahead(fused):
    torch.manual_seed(0)
    layer = Attention(8, 2, fused)
    x = torch.randn(2, 6, 8)
    y = x.clone()
    y[:, 4:] = torch.randn(2, 2, 8)
    torch.testing.assert_close(layer(x)[:, :4], layer(y)[:, :4])
    assert not torch.allclose(layer(x)[:, 4:], layer(y)[:, 4:])


def test_fused_attention_is_the_same_attention():
    torch.manual_seed(0)
    fused, stepwise = Attention(8, 2, True), Attention(8, 2, False)
    stepwise.load_state_dict(fused.state_dict())
    x = torch.randn(2, 6, 8)
    torch.testing.assert_close(fused(x), stepwise(x))


def test_positions_make_a_difference():
    for model in (transformer(1, hidden=8, **TEXT), gpt2_small(layers=1, **TEXT)):
        first, second = model[0](torch.zeros(1, 2, dtype=torch.long))[0]
        assert not torch.allclose(first, second)


def test_tied_head_is_the_table_of_the_embedding():
    torch.manual_seed(0)
    tied, untied = gpt2_small(tied=True, layers=1, **TEXT), gpt2_small(layers=1, **TEXT)
    table = tied[0].tokens.weight
    state = {**tied.state_dict(), f"{len(untied) - 1}.weight": table}
    untied.load_state_dict(state)
    x = words()
    torch.testing.assert_close(tied(x), untied(x))
    tied(x).square().sum().backward()
    untied(x).square().sum().backward()
    both = untied[0].tokens.weight.grad + untied[-1].weight.grad
    torch.testing.assert_close(table.grad, both)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: amoebanetd(10, 4, 16), "num_layers=4: .*multiple of 3"),
        (lambda: amoebanetd(10, 0, 16), "num_layers=0"),
        (lambda: amoebanetd(10, 3, 12), "num_filters=12: .*multiple of 8"),
        (lambda: unet(2, 0, 4), "num_convs=0"),
        (lambda: unet(2, 1, 3), "base_channels=3"),
        (lambda: Attention(8, 3, True), "heads=3: the width, 8"),
    ],
)
def test_impossible_sizes_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_samples_are_what_the_models_take():
    for entry, samples in itertools.product(MODELS, (1, 3)):
        sample = entry.sample(samples, "meta")
        assert sample.is_meta
        assert sample.shape[0] == samples
