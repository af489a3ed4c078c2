"""What differs in free-threaded builds of CPython, run with the interpreter's lock or without it.

There an object belongs to the thread that made it, which alone counts its references cheaply. What
other threads let go of is put down for that thread, and dies when it next runs Python. A thread
that sleeps keeps all of that alive, the memory of tensors included.
"""

from __future__ import annotations

import sys
import sysconfig

__all__ = ["FREE_THREADED", "has_lock"]

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def has_lock() -> bool:
    """Whether only one thread at a time can run Python."""
    return not FREE_THREADED or bool(sys._is_gil_enabled())  # type: ignore[attr-defined, unused-ignore]
