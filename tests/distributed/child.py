"""One of the processes of the tests, ``python -m tests.distributed.child RANK SIZE RENDEZVOUS``.

It runs functions by name (``module:function``, below ``tests.distributed``), each in all processes,
and writes down what they return, or how they failed.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback

import torch
from torch import distributed as dist

SECONDS = 100  # for one function


def main(rank: int, size: int, rendezvous: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    for line in sys.stdin:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        name, *args = json.loads(line)
        module, _, function = name.partition(":")
        answer = {}
        try:
            torch.manual_seed(0)
            found = importlib.import_module(f"tests.distributed.{module}")
            answer["result"] = getattr(found, function)(*args)
        except SystemExit as error:
            if isinstance(error.__cause__, Exception):  # it ends as by an error that nobody catches
                raise error.__cause__ from None
            raise
        except BaseException:
            answer["error"] = traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)
        faulthandler.cancel_dump_traceback_later()
    # A thread of gloo may still be letting go of a tensor, which aborts a process that ends in the
    # usual way meanwhile.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
