"""``benchmarks.models``: the sizes that were published, and models that a pipe can cut anywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import MODELS, PaperModel, amoebanetd, find, gpt2_small, unet, vgg16
from benchmarks.models.__main__ import row
from benchmarks.models.amoebanet import NORMAL, REDUCTION, CellKind, _operations
from benchmarks.models.resnet import resnet
from benchmarks.models.transformer import transformer
from syncpipe import Pipe
from syncpipe.skip import verify_skippables
from syncpipe.skip.layout import inspect_layout
from tests.support.models import assert_equals_plain

#: These take seconds, and have nothing in them that the smaller ones of their families have not.
LONG = {"AmoebaNet-D (72, 512)", "Transformer-415", "Transformer-1663"}


@functools.cache
def on_meta(entry: PaperModel) -> nn.Sequential:
    """Shared by the tests, which leave it as it is."""
    return entry.on_meta()


# -- the published sizes --------------------------------------------------------------------------


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_number_of_parameters_is_the_published_one(entry):
    count = entry.count(on_meta(entry))
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


def test_a_line_of_the_table_says_what_differs():
    entry = find("AmoebaNet-D (18, 416)")
    name, _, published, ours, _, remark = row(entry)
    assert (name, published, ours) == (entry.name, "318 M", "319 M")
    assert remark == f"+0.3 %: {entry.difference}"


def test_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(KeyError, match=r"no model 'AlexNet'.*VGG-16"):
        find("AlexNet")


@pytest.mark.parametrize(
    "entry", [entry for entry in MODELS if entry.name not in LONG], ids=lambda entry: entry.name
)
def test_real_size_runs_without_values(entry):
    verify_skippables(on_meta(entry))
    assert on_meta(entry)(entry.sample(1, "meta")).shape == (1, *entry.output)


# -- small ones, in a pipe ------------------------------------------------------------------------


def pictures(side: int) -> Tensor:
    return torch.randn(4, 3, side, side)


def words() -> Tensor:
    return torch.randint(11, (4, 6))


TEXT = {"width": 8, "heads": 2, "vocabulary": 11, "length": 6}
# The model, its input, a balance with cuts in awkward places, the skips that pass over them.
SMALL: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], Tensor], list[int], int]] = {
    "resnet": (
        lambda: resnet((1, 2), channels=8, num_classes=5), lambda: pictures(16), [4, 6, 9], 2
    ),
    "resnext": (
        lambda: resnet((1, 1), channels=8, groups=4, group_width=16, num_classes=5),
        lambda: pictures(16), [5, 3, 6], 2,
    ),
    "unet": (lambda: unet(2, 2, 4), lambda: pictures(16), [5, 6, 8], 2),
    "amoebanet": (lambda: amoebanetd(5, 3, 8), lambda: pictures(64), [20, 30, 33], 2),
    "transformer": (lambda: transformer(2, hidden=16, **TEXT), words, [2, 3, 2], 0),
    "vgg": (
        lambda: vgg16(5, image_size=32, channels=4, hidden=8, dropout=0.0),
        lambda: pictures(32), [9, 9, 4], 0,
    ),
    "gpt2": (lambda: gpt2_small(layers=2, **TEXT), words, [2, 3, 2], 0),
    "gpt2_tied": (lambda: gpt2_small(tied=True, layers=2, **TEXT), words, [2, 3, 2], 1),
}  # fmt: skip


@pytest.mark.parametrize("family", SMALL)
def test_in_a_pipe_it_computes_the_same_bits(family):
    build, sample, balance, crossing = SMALL[family]
    torch.manual_seed(0)
    pipe = assert_equals_plain(
        build(), sample(), balance, steps=2, chunks=2, devices=[f"cpu:{j}" for j in range(3)]
    )
    outgoing = inspect_layout([list(partition) for partition in pipe.partitions]).outgoing
    assert sum(map(len, outgoing)) == crossing


@pytest.mark.parametrize("family", ["unet", "resnet"])
def test_every_cut_of_it_is_possible(family):
    build, sample, _, _ = SMALL[family]
    torch.manual_seed(0)
    model, x = build().eval(), sample()
    expected = model(x)
    for cut in range(1, len(model)):
        pipe = Pipe(model, [cut, len(model) - cut], devices=["cpu:0", "cpu:0"])
        torch.testing.assert_close(pipe(x), expected, rtol=0, atol=0)


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
