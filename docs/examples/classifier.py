"""A classifier of digits: a loader, accuracy over the whole validation set, an average of
the weights (EMA), early stopping.

    python classifier.py
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset, random_split

from syncpipe import Pipe

EPOCHS, WIDTH, PATIENCE = (3, 8, 1) if "--tiny" in sys.argv else (50, 32, 3)
DEVICES = None if torch.accelerator.is_available() else ["cpu:0", "cpu:1"]  # None: all there are


def block(before: int, after: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(4, after), nn.ReLU()]


def accuracy(pipe: Pipe, loader: DataLoader) -> float:
    """Of all samples; the last mini-batch may be smaller than the others."""
    right = total = 0
    for images, labels in loader:
        output = pipe.eval_batch(images.to(pipe.devices[0]))
        right += int((output.argmax(1).cpu() == labels).sum())
        total += len(labels)
    return right / total


torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)  # [1797, 1, 8, 8]
data, held_out = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])
batches = DataLoader(data, batch_size=128, shuffle=True)
validation = DataLoader(held_out, batch_size=128)

layers = [*block(1, WIDTH, 1), *block(WIDTH, WIDTH, 1), *block(WIDTH, 2 * WIDTH, 2)]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * WIDTH, 10))
pipe = Pipe(model, "parameters", devices=DEVICES, chunks=4)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
average = AveragedModel(pipe, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # holds a pipe, too

best, best_state, waited = 0.0, pipe.state_dict(), 0
for epoch in range(EPOCHS):
    for images, labels in batches:
        optimizer.zero_grad()
        loss = pipe.train_batch(images.to(pipe.devices[0]), labels, loss_fn=F.cross_entropy)
        optimizer.step()
        average.update_parameters(pipe)
    found = accuracy(average.module, validation)
    print(f"epoch {epoch}: loss {loss:.3f}, validation {found:.1%}")
    if found > best:
        best, waited = found, 0
        best_state = {k: v.clone() for k, v in average.module.state_dict().items()}
    elif (waited := waited + 1) > PATIENCE:
        break

pipe.load_state_dict(best_state)
print(f"the best: {accuracy(pipe, validation):.1%}")
