"""A U-Net, written as everybody writes it, takes noise out of pictures of digits.

    python unet.py

``Pipe.auto`` makes layers of it. What its contracting path hands over to the expanding one crosses
from device to device by itself.
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from syncpipe import Pipe

TINY = "--tiny" in sys.argv
EPOCHS, WIDTH, SECONDS = (2, 8, 0.2) if TINY else (5, 32, 5.0)
DEVICES = None if torch.accelerator.is_available() else ["cpu:0", "cpu:1"]  # None: all there are
BATCH = 128


def double(before: int, after: int) -> nn.Sequential:
    layers = []
    for width in (before, after):
        layers += [nn.Conv2d(width, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015) for one channel: ``[N, 1, H, W]``, sizes divisible by 4."""

    def __init__(self, width: int):
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(map(double, [1, *widths], widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * after, after, 2, stride=2) for after in widths[-2::-1]
        )
        self.merge = nn.ModuleList(double(2 * after, after) for after in widths[-2::-1])
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down[:-1]:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([kept.pop(), up(x)], dim=1))
        return self.last(x)


torch.manual_seed(0)
images = torch.tensor(load_digits().images / 16, dtype=torch.float32).unsqueeze(1)
clean, test = images[:1536], images[1536:]
noisy_test = test + 0.3 * torch.randn_like(test)

model = UNet(WIDTH)
pipe = Pipe.auto(model, clean[:4], batch_size=BATCH, devices=DEVICES, timeout=SECONDS)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
for epoch in range(EPOCHS):
    for rows in torch.randperm(len(clean)).split(BATCH):
        noisy = clean[rows] + 0.3 * torch.randn(len(rows), 1, 8, 8)
        optimizer.zero_grad()
        loss = pipe.train_batch(noisy.to(pipe.devices[0]), clean[rows], loss_fn=F.mse_loss)
        optimizer.step()
    found = pipe.eval_batch(noisy_test.to(pipe.devices[0]), test, loss_fn=F.mse_loss)
    print(f"epoch {epoch}: loss {loss:.4f}, of the test {found:.4f}")
print(f"without the model: {F.mse_loss(noisy_test, test):.4f}")
