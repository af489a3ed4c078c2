"""What takes long and needs no run at every commit; its table goes to ``tests/README.md``.

    python -m tests.long             # all of it, under an hour on two idle cores
    python -m tests.long fuzz leaks  # parts of it
    python -m tests.long --quick     # a little of each part, to see that it runs

Before a release, and before a change of ``syncpipe/runtime``, ``stages`` or ``training`` ends.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests import simulated

ROOT = Path(__file__).parent.parent
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--tb=short")
_FAILURES = "tests/training/failures"
_STEPS = ("tests/accelerators/test_accelerators_memory.py", "tests/training/test_train_memory.py")


def parts(quick: bool) -> dict[str, tuple[Sequence[str], dict[str, str]]]:
    """For each part its command, and what it adds to the environment."""
    python, sim = sys.executable, {"SYNCPIPE_SIMULATED": "1"}
    models, simulated_models, steps = ("20", "10", "20") if quick else ("5000", "1500", "1000")
    words, meshes = (["runtime/engine"], "4") if quick else ([], "300")
    apart = dict.fromkeys(("SYNCPIPE_CELLS", "SYNCPIPE_LINES"), "9" if quick else "1")
    random_meshes = [*_PYTEST, "tests/distributed/stages/test_random_meshes.py"]
    fuzz = ["--seed", "24", "--models"]
    return {
        "fuzz": ([python, "-m", "tests.fuzz", *fuzz, models], {}),
        "lives": ([python, "-m", "tests.fuzz", "lives", *fuzz, models], {}),
        "simulated": ([python, "-m", "tests.simulated.fuzz", *fuzz, simulated_models], {}),
        "leaks": ([*_PYTEST, *_STEPS, "-k", "steps or nothing"], {**sim, "SYNCPIPE_STEPS": steps}),
        "mutations": ([python, "-m", "tests.mutations", *words], {}),
        "meshes": (random_meshes, {"SYNCPIPE_MESHES": meshes}),
        "quick": ([*_PYTEST, "tests/benchmarks", "-k", "quick or parts"], {"SYNCPIPE_QUICK": "1"}),
        "failures": ([*_PYTEST, _FAILURES, "-k", "each_line or anywhere"], apart),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs parts; the number of those that failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.long", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts(True))}")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    chosen = parts(options.quick)
    for name in options.parts:
        if name not in chosen:
            parser.error(f"there is no part {name!r}: {', '.join(chosen)}")
    rows, failed = [], 0
    for name in options.parts or chosen:
        command, more = chosen[name]
        if "SYNCPIPE_SIMULATED" in more and simulated.unavailable() is not None:
            more = {key: more[key] for key in more if key != "SYNCPIPE_SIMULATED"}
        print(f"\n==> {name}: {' '.join(command)}", flush=True)
        begun = time.monotonic()
        code, last = run(command, more)
        failed += code != 0
        minutes = (time.monotonic() - begun) / 60
        rows.append(f"| `{name}` | {last} | {minutes:.1f} |")
    print(f"\n{datetime.date.today()}, torch {torch.__version__}, {os.cpu_count()} cores\n")
    print("| part | result | minutes |\n|---|---|---|", *rows, sep="\n")
    return failed


def run(command: Sequence[str], more: dict[str, str]) -> tuple[int, str]:
    """Runs a command, shows what it prints, and returns its code and its last full line."""
    last = ""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **more}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if re.match(r"\d", line):
                last = line.strip()
    return process.returncode, last if process.returncode == 0 else f"**failed**: {last}"


if __name__ == "__main__":
    sys.exit(min(1, main()))
