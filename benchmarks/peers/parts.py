"""Peers side by side: the plain model, ours, torchgpipe, fairscale, torch.distributed.pipelining.

Four parts on the CPU: ``tiny`` (layers that compute next to nothing: the overhead), ``linear``
(8 x Linear(1024)), ``resnext`` (a small one, with skips) and ``transformer`` (a small one). Three
on one GPU, ``gpu-resnext101``, ``gpu-unet`` and ``gpu-gpt2``, which are skipped where there is
none. In each part all peers train the very same layers in every round, in an order that changes
from round to round, after they were seen to give the plain loop's gradients. Libraries that are
missing are skipped, and the report says so.
"""

from __future__ import annotations

from benchmarks.common import Group
from benchmarks.peers import cpu, gpu
from benchmarks.peers.libraries import LIBRARIES

GROUP = Group(
    "peers",
    "Peers side by side",
    __doc__,
    {**cpu.PARTS, **gpu.PARTS},
    versions=tuple(LIBRARIES),
    one_thread=False,
)
