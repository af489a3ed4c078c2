"""Batches that are not cut along dimension 0 of tensors: graphs, and lists of any length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import syncpipe
from syncpipe import Pipe, RepeatingLoader, sequential, verify
from syncpipe.data.batches import gather, scatter
from syncpipe.layers.conversion.sequential import Converted


class Graphs:
    """Several graphs as one: nodes, edges, and for each node which graph it is of."""

    def __init__(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> None:
        self.x, self.edge_index, self.batch, self.y = x, edge_index, batch, y

    @property
    def num_graphs(self) -> int:
        return len(self.y)


def cut(graphs: Graphs, sizes: list[int]) -> list[Graphs]:
    found, first = [], 0
    for size in sizes:
        nodes = (graphs.batch >= first) & (graphs.batch < first + size)
        start = int(nodes.nonzero()[0])
        edges = graphs.edge_index[:, nodes[graphs.edge_index[0]]] - start
        batch = graphs.batch[nodes] - first
        found.append(Graphs(graphs.x[nodes], edges, batch, graphs.y[first : first + size]))
        first += size
    return found


def join(parts: list[Graphs]) -> Graphs:
    nodes = torch.tensor([0, *(len(p.x) for p in parts)]).cumsum(0)
    samples = torch.tensor([0, *(len(p.y) for p in parts)]).cumsum(0)
    return Graphs(
        torch.cat([p.x for p in parts]),
        torch.cat([p.edge_index + n for p, n in zip(parts, nodes, strict=False)], 1),
        torch.cat([p.batch + n for p, n in zip(parts, samples, strict=False)]),
        torch.cat([p.y for p in parts]),
    )


class Ragged(list):  # type: ignore[type-arg]
    """Tensors, each of a length of its own; a list is itself no batch."""


@dataclass
class Padded:
    """What pytree knows nothing of, but syncpipe does: samples are in dimension 1."""

    steps: Tensor


syncpipe.register_batch(Graphs, lambda graphs: len(graphs.y), cut, join)
syncpipe.register_batch(
    Ragged,
    len,
    lambda ragged, sizes: [Ragged(ragged[sum(sizes[:k]) :][:n]) for k, n in enumerate(sizes)],
    lambda parts: Ragged([each for part in parts for each in part]),
)
syncpipe.register_batch(
    Padded,
    lambda padded: padded.steps.shape[1],
    lambda padded, sizes: [Padded(steps) for steps in padded.steps.split(sizes, 1)],
    lambda parts: Padded(torch.cat([part.steps for part in parts], 1)),
)


def graphs(n: int) -> Graphs:
    """So many graphs of 2, 3, 4, 2, ... nodes in a circle."""
    torch.manual_seed(n)
    each = []
    for k in range(n):
        nodes = 2 + k % 3
        circle = torch.arange(nodes)
        edges = torch.stack([circle, circle.roll(1)])
        y = torch.rand(1, 2)
        each.append(Graphs(torch.rand(nodes, 4), edges, torch.zeros(nodes, dtype=torch.long), y))
    return join(each)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        return self.own(x).index_add(0, target, self.others(x)[source]).relu()


class GraphNet(nn.Module):
    def __init__(self, of: str = "graphs") -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(Convolution() for _ in range(3))
        self.head, self.of = nn.Linear(4, 2), of

    def forward(self, data: Graphs) -> Any:
        x = data.x
        for convolution in self.convolutions:
            x = convolution(x, data.edge_index)
        if self.of == "nodes":
            return self.head(x)
        if self.of == "batches":
            return Graphs(self.head(x), data.edge_index, data.batch, data.y)
        pooled = x.new_zeros(data.num_graphs, 4).index_add(0, data.batch, x)
        return self.head(pooled)


def piped(layers: nn.Sequential, chunks: int = 3) -> Pipe:
    return Pipe(layers, balance="uniform", devices=["cpu:0", "cpu:1"], chunks=chunks)


def values(batch: Graphs) -> list[Tensor]:
    return [batch.x, batch.edge_index, batch.batch, batch.y]


def test_they_are_cut_and_put_together() -> None:
    whole = graphs(7)
    parts = scatter({"graphs": whole, "y": whole.y}, 3)
    assert [len(part["graphs"].y) for part in parts] == [3, 3, 1]
    assert all(int(part["graphs"].edge_index.max()) < len(part["graphs"].x) for part in parts)
    assert_close(values(gather([part["graphs"] for part in parts])), values(whole))
    with pytest.raises(
        ValueError, match=r"input\[0\]: Graphs\[7\] gives 3 micro-batches of 3, 3, 1"
    ):
        scatter((whole, torch.rand(6)), 3)
    steps = torch.rand(3, 4, 2)
    assert_close(scatter(Padded(steps), 2)[1].steps, steps[:, 2:])


def test_converted_models_take_them() -> None:
    model, whole = GraphNet(), graphs(8)
    layers = sequential(model, graphs(4))
    assert len(layers) > 3
    assert not layers.whole
    pipe = piped(layers)
    assert_close(pipe(whole), model(whole))
    loss = pipe.train_batch(whole, whole.y, loss_fn=F.mse_loss, verify=True)
    grads = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    expected = F.mse_loss(model(whole), whole.y)
    expected.backward()  # type: ignore[no-untyped-call]
    assert_close((loss, grads), (expected.detach(), [p.grad for p in model.parameters()]))
    assert_close(pipe.eval_batch(whole), model(whole))
    assert_close(pipe.eval_batch(whole, whole.y, loss_fn=F.mse_loss, verify=True), expected)
    assert verify(pipe, whole, whole.y, loss_fn=F.mse_loss).ok
    # As a target, which says itself by what its loss counts; and from a loader.
    data = iter(RepeatingLoader([(graphs(2), graphs(2)), (graphs(3), graphs(3))]))
    pipe = piped(layers, chunks=2)
    found, output = pipe.train_batch(
        data_iter=data, loss_fn=lambda y, target: F.mse_loss(y, target.y), return_outputs=True
    )
    both = join([graphs(2), graphs(3)])
    assert_close((found, output), (F.mse_loss(model(both), both.y), model(both)))


@pytest.mark.parametrize("of", ["nodes", "batches"])
def test_outputs_of_nodes_and_batches_of_them(of: str) -> None:
    model, whole = GraphNet(of), graphs(8)
    if of == "batches":
        with pytest.raises(ValueError, match="Graphs that is made anew"):
            sequential(model, graphs(4))
        return
    pipe = piped(sequential(model, graphs(4)))
    assert_close(pipe(whole), model(whole))

    def loss(output: Tensor, target: Graphs) -> Any:
        return (output - target.x[:, :2]).square().mean(), len(target.x)

    found = pipe.train_batch(whole, whole, loss_fn=loss, verify=True)
    assert_close(found, loss(model(whole), whole)[0])
    assert verify(pipe, whole, whole, loss_fn=loss).ok


class Step(nn.Module):
    """Takes a batch, and hands it on with other nodes."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.inner, self.in_place = Convolution(), in_place

    def forward(self, data: Graphs) -> Graphs:
        x = self.inner(data.x, data.edge_index)
        if not self.in_place:
            return Graphs(x, data.edge_index, data.batch, data.y)
        data.x = x
        return data


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.head = nn.ModuleList(Step() for _ in range(4)), nn.Linear(4, 2)

    def forward(self, data: Graphs) -> Tensor:
        for step in self.steps:
            data = step(data)
        return self.head(data.x)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("in_place", [True, False])
def test_layers_hand_them_on(checkpoint: Any, in_place: bool) -> None:
    torch.manual_seed(0)
    plain, whole = nn.Sequential(*[Step(in_place) for _ in range(4)]), graphs(5)
    pipe = Pipe(
        plain, [1, 2, 1], devices=["cpu:0", "cpu:1", "cpu:2"], chunks=2, checkpoint=checkpoint
    )
    whole.x.requires_grad_()
    expected = plain(join([whole]))
    assert_close(values(pipe(whole)), values(expected))
    wanted = torch.autograd.grad(expected.x.sum(), [whole.x, *plain.parameters()])
    assert_close(torch.autograd.grad(pipe(whole).x.sum(), [whole.x, *plain.parameters()]), wanted)
    loss = pipe.train_batch(whole, loss_fn=lambda out: (out.x.mean(), len(out.x)))
    assert_close(loss, expected.x.mean())


def test_modules_that_write_into_a_batch_are_layers() -> None:
    model, whole = Steps(), graphs(7)
    layers = sequential(model, graphs(4))
    assert [leaf.path for leaf in layers.whole] == [f"steps.{k}" for k in range(4)]
    assert "sets x of a Graphs that it was given" in layers.whole[0].reason
    assert_close(piped(layers)(whole), model(join([whole])))


def test_auto_takes_them() -> None:
    model, whole = GraphNet(), graphs(8)
    pipe = Pipe.auto(
        model, graphs(4), batch_size=8, loss_fn=F.mse_loss, target=graphs(4).y,
        devices=["cpu:0", "cpu:1"], verbose=False,
    )  # fmt: skip
    assert_close(pipe(whole), model(whole))


class Sums(nn.Module):
    def forward(self, ragged: Ragged) -> Tensor:
        return torch.stack([each.sum(0) for each in ragged])


class OfLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sums, self.a, self.b = Sums(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ragged: Ragged) -> Tensor:
        return self.b(self.a(self.sums(ragged)).relu())


def test_lists_of_any_length() -> None:
    model, ragged = OfLists(), Ragged(torch.rand(k + 1, 4) for k in range(5))
    layers: Converted = sequential(model, Ragged(ragged[:3]))
    pipe = piped(layers, chunks=2)
    assert_close(pipe(ragged), model(ragged))
    target = torch.rand(5, 4)
    loss = pipe.train_batch(ragged, target, loss_fn=F.mse_loss, verify=True)
    assert_close(loss, F.mse_loss(model(ragged), target))


class Attends(OfLists):
    def forward(self, x: Tensor, mask: Any) -> Tensor:
        return self.b(self.a(x)) if mask is not None else x


class Cache:
    def __init__(self, keys: Tensor) -> None:
        self.layers = [keys]


def test_block_masks_and_caches_are_refused_with_the_reason() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    documents = torch.arange(128)[None] // torch.tensor([16, 32, 64, 8])[:, None]

    def same(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[b, q] == documents[b, k]

    mask, x = flex.create_block_mask(same, 4, None, 128, 128, device="cpu"), torch.rand(4, 4)
    with pytest.raises(
        TypeError, match=r"BlockMask, holds .* create_block_mask from tensors that are"
    ):
        piped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))((x, mask))
    with pytest.raises(
        ValueError, match=r"mask is a BlockMask, .* at mask\.kv_num_blocks .* takes the index"
    ):
        sequential(Attends(), x, mask)
    with pytest.raises(ValueError, match=r"mask is a Cache, .* mask\.layers\[0\] .* Leave it out"):
        sequential(Attends(), x, Cache(x))


def test_what_is_registered_is_checked() -> None:
    for kind in (list, Tensor, int, 3):
        with pytest.raises(TypeError, match="a class of batches of your own"):
            syncpipe.register_batch(kind, len, len, len)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="join must be a function, not int"):
        syncpipe.register_batch(Ragged, len, len, 3)  # type: ignore[arg-type]

    class Short(Ragged):
        pass

    syncpipe.register_batch(Short, len, lambda each, sizes: [each] * len(sizes), list.__add__)
    with pytest.raises(
        ValueError, match=r"register_batch\(Short, .* of 2, 2 samples, and returned 4, 4"
    ):
        scatter(Short([torch.rand(1)] * 4), 2)
