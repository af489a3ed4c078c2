"""A Wasserstein GAN with a gradient penalty (Gulrajani et al. 2017): two pipes, digits of 8 x 8.

    python gan.py

The critic's loss needs whole mini-batches, and the penalty a gradient of a gradient, so both pipes
are called as modules, ``pipe(x)``. Under ``create_graph=True`` the micro-batches run one after
another.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from syncpipe import Pipe

STEPS, WIDTH = (3, 16) if "--tiny" in sys.argv else (101, 128)
CRITIC_STEPS, BATCH, NOISE, PENALTY = 3, 64, 16, 10.0
DEVICES = None if torch.accelerator.is_available() else ["cpu:0", "cpu:1"]  # None: all there are


def perceptron(before: int, after: int, *last: nn.Module) -> nn.Sequential:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.SiLU())]
    return nn.Sequential(
        nn.Linear(before, WIDTH), nn.SiLU(), *hidden, nn.Linear(WIDTH, after), *last
    )


def penalty(real: Tensor, fake: Tensor) -> Tensor:
    """How far the critic's slope between real and fake samples is from 1."""
    part = torch.rand(len(real), 1).to(real.device)
    between = (part * real + (1 - part) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


torch.manual_seed(0)
data = torch.tensor(load_digits().images / 16, dtype=torch.float32).flatten(1)
generator = Pipe(perceptron(NOISE, 64, nn.Sigmoid()), "parameters", devices=DEVICES, chunks=4)
critic = Pipe(perceptron(64, 1), "parameters", devices=DEVICES, chunks=4)
makes = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
judges = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))


def noise() -> Tensor:
    return torch.randn(BATCH, NOISE).to(generator.devices[0])


for step in range(STEPS):
    for _ in range(CRITIC_STEPS):
        real = data[torch.randint(len(data), (BATCH,))].to(critic.devices[0])
        with torch.no_grad():
            fake = generator(noise()).to(real.device)
        judges.zero_grad()
        distance = critic(real).mean() - critic(fake).mean()
        slope = penalty(real, fake)
        (PENALTY * slope.to(distance.device) - distance).backward()
        judges.step()
    makes.zero_grad()
    fake = generator(noise())
    (-critic(fake.to(critic.devices[0])).mean()).backward()  # through both pipes
    makes.step()
    if step % (STEPS // 2) == 0:
        print(f"step {step}: distance {distance:.3f}, penalty {slope:.3f}")
