"""Graphs of PyTorch Geometric, as the guide registers them."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import syncpipe
from syncpipe import Pipe, sequential, verify

pytest.importorskip("torch_geometric")
from torch_geometric import nn as geometric
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader


def cut(batch: Any, sizes: list[int]) -> list[Any]:
    graphs = iter(batch.to_data_list())
    return [Batch.from_data_list([*islice(graphs, n)]) for n in sizes]


def join(batches: list[Any]) -> Any:
    return Batch.from_data_list([graph for batch in batches for graph in batch.to_data_list()])


@pytest.fixture(autouse=True)
def registered() -> None:
    """Before each test: examples and pages register the class as well, with functions of theirs."""
    syncpipe.register_batch(Batch, lambda batch: batch.num_graphs, cut, join)


def graphs(n: int) -> list[Any]:
    found = []
    for k in range(n):
        circle = torch.arange(2 + k % 3)
        edges = torch.stack([circle, circle.roll(1)])
        found.append(Data(x=torch.rand(len(circle), 4), edge_index=edges, y=torch.rand(1, 2)))
    return found


class Net(nn.Module):
    def __init__(self, convolution: Any, pools: bool) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(convolution() for _ in range(3))
        self.pool = geometric.MeanAggregation() if pools else None
        self.head = nn.Linear(4, 2)

    def forward(self, data: Any) -> Tensor:
        x, edge_index = data.x, data.edge_index
        for convolution in self.convolutions:
            x = convolution(x, edge_index).relu()
        if self.pool is not None:
            return self.head(self.pool(x, data.batch))
        return self.head(geometric.global_mean_pool(x, data.batch, size=data.num_graphs))


CONVOLUTIONS = {
    "gcn": lambda: geometric.GCNConv(4, 4),
    "gat": lambda: geometric.GATConv(4, 4),
    "gin": lambda: geometric.GINConv(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))),
}


@pytest.mark.parametrize("pools", [True, False])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_graph_networks_are_converted_and_train(kind: str, pools: bool) -> None:
    torch.manual_seed(2)
    model = Net(CONVOLUTIONS[kind], pools)
    layers = sequential(model, Batch.from_data_list(graphs(4)))
    assert len(layers) >= 4
    pipe = Pipe(layers, balance="uniform", devices=["cpu:0", "cpu:1"], chunks=3)
    for batch in DataLoader(graphs(15), batch_size=8):
        assert_close(pipe(batch), model(batch))
        assert_close(pipe.eval_batch(batch), model(batch))
        model.zero_grad()
        expected = F.mse_loss(model(batch), batch.y)
        wanted = torch.autograd.grad(expected, [*model.parameters()])
        loss = pipe.train_batch(batch, batch.y, loss_fn=F.mse_loss, verify=True)
        grads = [parameter.grad for parameter in model.parameters()]
        assert_close((loss, grads), (expected, [*wanted]))
    assert verify(pipe, batch, batch.y, loss_fn=F.mse_loss).ok


def test_auto_takes_a_batch_of_graphs() -> None:
    model, batch = Net(CONVOLUTIONS["gcn"], pools=True), Batch.from_data_list(graphs(8))
    pipe = Pipe.auto(model, batch, batch_size=8, devices=["cpu:0", "cpu:1"], verbose=False)
    assert_close(pipe(batch), model(batch))


def test_pooling_without_the_number_of_graphs_says_what_to_pass() -> None:
    class Uncounted(Net):
        def forward(self, data: Any) -> Any:
            return self.head(geometric.global_mean_pool(data.x, data.batch))

    with pytest.raises(ValueError, match=r"size=data\.num_graphs"):
        sequential(Uncounted(CONVOLUTIONS["gcn"], True), Batch.from_data_list(graphs(4)))
