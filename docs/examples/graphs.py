"""A graph network of PyTorch Geometric: handwritten digits as graphs of their dark pixels.

    pip install torch_geometric scikit-learn
    python graphs.py

``register_batch`` defines once how a ``Batch`` of graphs is cut and joined. Then a batch is an
input like any other: the pipe cuts it into micro-batches of whole graphs.
"""

import sys
from itertools import islice

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool

import syncpipe
from syncpipe import Pipe

EPOCHS, WIDTH, GRAPHS = (1, 16, 160) if "--tiny" in sys.argv else (10, 64, 1797)
DEVICES = None if torch.accelerator.is_available() else ["cpu:0", "cpu:1"]  # None: all there are


def cut(batch: Batch, sizes: list[int]) -> list[Batch]:
    graphs = iter(batch.to_data_list())
    return [Batch.from_data_list([*islice(graphs, size)]) for size in sizes]


def join(batches: list[Batch]) -> Batch:
    return Batch.from_data_list([graph for batch in batches for graph in batch.to_data_list()])


syncpipe.register_batch(Batch, lambda batch: batch.num_graphs, cut, join)


def graph(image: Tensor, digit: int) -> Data:
    """The dark pixels of an image, and an edge for each two of them that touch."""
    places = (image > 0.3).nonzero()
    far = (places[:, None] - places[None]).abs().amax(-1)
    features = torch.cat([places / 7, image[image > 0.3][:, None]], 1)
    return Data(x=features, edge_index=(far == 1).nonzero().t(), y=torch.tensor([digit]))


class Net(nn.Module):
    """Graph isomorphism convolutions (Xu et al. 2019) with residuals, and a sum over each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6))
        self.convolutions = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
            for _ in range(6)
        )
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, data: Batch) -> Tensor:
        x = self.first(data.x)
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            x = x + convolution(norm(x), data.edge_index)
        # size= keeps the number of graphs out of the values that Python would look at.
        return self.last(global_add_pool(x, data.batch, size=data.num_graphs) / 16)


torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images[:GRAPHS] / 16, dtype=torch.float32)
graphs = [graph(*pair) for pair in zip(images, digits.target[:GRAPHS], strict=True)]
training, validation = graphs[: len(graphs) * 4 // 5], graphs[len(graphs) * 4 // 5 :]

sample = Batch.from_data_list(training[:4])
layers = syncpipe.sequential(Net(), sample)
pipe = Pipe(layers, "parameters", devices=DEVICES, chunks=4)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
print(f"{len(pipe)} layers")
for epoch in range(EPOCHS):
    for batch in DataLoader(training, batch_size=32, shuffle=True, drop_last=True):
        optimizer.zero_grad()
        loss = pipe.train_batch(batch, batch.y, loss_fn=F.cross_entropy)
        optimizer.step()
    right = 0
    for batch in DataLoader(validation, batch_size=32):
        right += int((pipe.eval_batch(batch).argmax(1).cpu() == batch.y).sum())
    print(f"epoch {epoch}: loss {loss:.3f}, validation {right / len(validation):.1%}")
