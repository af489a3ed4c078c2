"""A ResNeXt as a chain of small layers, cut anywhere: its shortcuts are skips, written by hand.

    python resnext.py

A stage boundary may be inside of a block. The shortcut then goes straight from the device that
stashes it to the one that pops it.
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from syncpipe import Pipe, pop, skippable, stash
from syncpipe.skip import Namespace

EPOCHS, WIDTH, DEPTH = (2, 8, 1) if "--tiny" in sys.argv else (5, 32, 3)
DEVICES = None if torch.accelerator.is_available() else ["cpu:0", "cpu:1"]  # None: all there are


@skippable(stash=["shortcut"])
class Fork(nn.Module):
    def forward(self, x: Tensor):
        yield stash("shortcut", x)
        return x


@skippable(pop=["shortcut"])
class Join(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.project = nn.Conv2d(before, after, 1, stride) if before != after else nn.Identity()

    def forward(self, x: Tensor):
        shortcut = yield pop("shortcut")
        return F.relu(x + self.project(shortcut))


def block(before: int, after: int, stride: int, groups: int = 4) -> list[nn.Module]:
    """Aggregated residual transformations (Xie et al. 2017), as nine layers."""
    name = Namespace()  # keeps this shortcut apart from those of other blocks
    return [
        Fork().isolate(name),
        *(nn.Conv2d(before, after, 1), nn.GroupNorm(4, after), nn.ReLU()),
        *(nn.Conv2d(after, after, 3, stride, 1, groups=groups), nn.GroupNorm(4, after), nn.ReLU()),
        nn.Conv2d(after, after, 1),
        Join(before, after, stride).isolate(name),
    ]


torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(digits.target)
images, labels, test_images, test_labels = (
    images[:1536],
    labels[:1536],
    images[1536:],
    labels[1536:],
)

layers = [nn.Conv2d(1, WIDTH, 3, padding=1), *block(WIDTH, WIDTH, 1)]
for width in (WIDTH, 2 * WIDTH):
    layers += block(width, 2 * width, 2)
    layers += [layer for _ in range(DEPTH - 1) for layer in block(2 * width, 2 * width, 1)]
layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * WIDTH, 10)]
model = nn.Sequential(*layers)  # it runs without a pipe, too
pipe = Pipe(model, "parameters", devices=DEVICES, chunks=4)
print(f"{len(pipe)} layers")

optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
for epoch in range(EPOCHS):
    for rows in torch.randperm(len(images)).split(128):
        optimizer.zero_grad()
        input = images[rows].to(pipe.devices[0])
        loss = pipe.train_batch(input, labels[rows], loss_fn=F.cross_entropy)
        optimizer.step()
    output = pipe.eval_batch(test_images.to(pipe.devices[0]))
    right = (output.argmax(1).cpu() == test_labels).float().mean()
    print(f"epoch {epoch}: loss {loss:.3f}, test accuracy {right:.1%}")
