"""The demo's data: the handwritten digits that come with scikit-learn."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BATCH_SIZE", "Digits", "batches", "load_digits", "varied"]

#: Images in a mini-batch.
BATCH_SIZE = 128


@dataclass(frozen=True)
class Digits:
    """Images of shape ``[N, 1, 8, 8]`` with values from 0 to 1, labels of shape ``[N]``."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def many(self, size: int) -> tuple[Tensor, Tensor]:
        """So many images and labels to measure with: those to train with, again and again."""
        which = torch.arange(size) % len(self.train_labels)
        return self.train_images[which], self.train_labels[which]


def load_digits() -> Digits:
    """The 1,797 images, a fifth of them to test with.

    Raises:
        ImportError: without scikit-learn.
    """
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    data = datasets.load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(data.target, dtype=torch.int64)
    # The same split for every seed, so that accuracies can be compared.
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, stratify=data.target, random_state=0
    )
    return Digits(images[train], labels[train], images[test], labels[test])


def batches(digits: Digits) -> Iterator[tuple[Tensor, Tensor]]:
    """The mini-batches of an epoch; the few images that fill none sit it out."""
    order = torch.randperm(len(digits.train_labels))
    for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
        batch = order[start : start + BATCH_SIZE]
        yield varied(digits.train_images[batch]), digits.train_labels[batch]


def varied(images: Tensor) -> Tensor:
    """Each image a little turned, scaled and moved, so that a small model learns to read."""
    size = len(images)
    angle = torch.empty(size).uniform_(-0.2, 0.2)  # radians
    scale = torch.empty(size).uniform_(0.9, 1.1)
    x, y = torch.empty(2, size).uniform_(-0.125, 0.125)  # half a pixel
    cos, sin = scale * angle.cos(), scale * angle.sin()
    matrix = torch.stack([cos, -sin, x, sin, cos, y], 1).view(size, 2, 3)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
