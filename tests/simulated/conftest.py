"""These tests are collected where the simulated machine is loaded.

That is in a process that is started with ``SYNCPIPE_SIMULATED=1``: the devices cannot be unloaded,
and other tests expect a machine without accelerators. ``tests/test_simulated.py`` starts such ones.
"""

from __future__ import annotations

from tests import simulated

collect_ignore_glob = [] if simulated.loaded() else ["test_*"]
