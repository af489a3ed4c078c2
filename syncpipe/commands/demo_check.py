"""The demo's check: ``train_batch`` beside the plain model, fed the same micro-batches."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe

__all__ = ["compare", "plain_step"]

# Relative to the largest gradient: an accelerator may sum in another order on another device.
TOLERANCE = 1e-3


def plain_step(
    model: nn.Sequential, images: Tensor, labels: Tensor, chunks: int, order: Sequence[int]
) -> Tensor:
    """What a pipe has to compute: forward and backward of the plain model, by micro-batches.

    Args:
        model: its gradients are added to.
        images: the mini-batch, on the device of the model.
        labels: on the same device.
        chunks: the number of micro-batches.
        order: in which micro-batches go back.

    Returns:
        The loss of the mini-batch.
    """
    shares = []
    for x, y in zip(images.chunk(chunks), labels.chunk(chunks), strict=True):
        shares.append(F.cross_entropy(model(x), y) * (len(y) / len(labels)))
    for i in order:
        shares[i].backward()  # type: ignore[no-untyped-call]
    return sum(shares[1:], shares[0]).detach()


def compare(pipe: Pipe, loss: Tensor, plain: nn.Sequential, expected: Tensor) -> tuple[bool, str]:
    """Whether pipe and plain model have the same loss and gradients, and that in words.

    On the CPU the same means bit for bit, elsewhere within ``TOLERANCE``.
    """
    pairs = list(zip(pipe.parameters(), plain.parameters(), strict=True))
    ours = [p.grad.cpu() for p, _ in pairs if p.grad is not None]
    theirs = [q.grad.cpu() for _, q in pairs if q.grad is not None]
    if len(ours) < len(pairs) or len(theirs) < len(pairs):
        return False, "WRONG: a parameter of the pipe or of the plain model got no gradient"
    ours, theirs = [loss.cpu(), *ours], [expected.cpu(), *theirs]
    what = f"loss {loss.item():.4f} and all {len(pairs)} gradients"
    if all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
        return True, f"{what} are equal to the plain model's, bit for bit"

    difference = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    largest = max(float(b.abs().max()) for b in theirs[1:])
    on_cpu = all(device.type == "cpu" for device in pipe.devices)
    close = not on_cpu and difference <= TOLERANCE * largest  # False for nan
    return close, (
        f"{'' if close else 'WRONG: '}{what} differ from the plain model's by {difference:.1e} at "
        f"most\n   (the largest gradient is {largest:.1e}); devices may sum in different orders"
    )
