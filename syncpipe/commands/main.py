"""The command line: ``python -m syncpipe COMMAND``, or, installed, ``syncpipe COMMAND``."""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import syncpipe
from syncpipe.commands import demo, plan

__all__ = ["main"]

_INTERRUPTED, _NO_READER = 130, 141  # as shells say it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status; without one, say which there are.

    Raises:
        SystemExit: with status 2 for a wrong argument, after usage and reason went to stderr.
    """
    script = Path(sys.argv[0]).name == "syncpipe"
    parser = argparse.ArgumentParser(
        prog="syncpipe" if script else "python -m syncpipe",
        description="Pipeline parallelism for PyTorch on one machine: one model on several "
        "devices, in one line, Pipe(model, balance=[2, 2], chunks=8).",
        epilog="Each command says more with --help. How to wrap and train a model of your own: "
        "README.md and docs/guide.md.",
    )
    versions = f"PyTorch {torch.__version__}, Python {platform.python_version()}"
    version = f"syncpipe {syncpipe.__version__} ({versions})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    about = "plan, check, train and measure a small model on handwritten digits (half a minute)"
    command = commands.add_parser("demo", help=about, description=demo.__doc__)
    demo.add_arguments(command)
    command.set_defaults(run=demo.run)
    about = "find how to cut a model and run it on several devices, here or elsewhere"
    command = commands.add_parser("plan", help=about, description=plan.__doc__)
    plan.add_arguments(command)
    command.set_defaults(run=plan.run)

    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        print(f"\n{parser.prog} {args.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # whoever read this, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER
    return status
