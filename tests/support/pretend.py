"""A plugin (``pytest -p tests.support.pretend``): PyTorch says that there are accelerators.

There are none, so whatever lands on one fails: a test that passes needs no accelerator, and does
not mind one.
"""

from __future__ import annotations

import torch

torch.accelerator.is_available = lambda: True
torch.accelerator.device_count = lambda: 4
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
