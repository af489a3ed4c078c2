"""What may take part in a call, in the order in which it joins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncpipe.stages.checks import check_collectives
from syncpipe.stages.offload import offload
from syncpipe.stages.sharing import share

#: ``check_collectives`` refuses; ``share`` may copy weights.
CALL: list[Callable[[Any], None]] = [check_collectives, offload, share]
