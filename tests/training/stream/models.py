"""Small models, mini-batches and optimizers for tests of ``train_stream``."""

import torch
from torch import Tensor, nn

WORKERS = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


def mlp(normed: bool = False) -> nn.Sequential:
    """Seven layers, 8 numbers to 4; with running statistics if ``normed``."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16) if normed else nn.Tanh(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 6),
        nn.Tanh(),
        nn.Linear(6, 4),
    )


def mini_batches(steps: int, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(size, 8), torch.randint(0, 4, (size,))) for _ in range(steps)]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)
