"""What differs in free-threaded builds of CPython, run with the interpreter's lock or without it.

There an object belongs to the thread that made it, which alone counts its references cheaply. What
other threads let go of is put down for that thread, and dies when it next runs Python. A thread
that sleeps keeps all of that alive, the memory of tensors included.
"""

from __future__ import annotations

import sysconfig

__all__ = ["FREE_THREADED"]

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
