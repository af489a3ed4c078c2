"""The command line: ``python -m syncpipe COMMAND``, or, installed, ``syncpipe COMMAND``."""

import argparse
import difflib
import os
import platform
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import syncpipe

__all__ = ["main"]

_INTERRUPTED, _NO_READER = 130, 141  # the shell's exit statuses for SIGINT and SIGPIPE


_COMMANDS = {
    "demo": "plan, check, train and measure a small model on handwritten digits (half a minute)",
    "plan": "find how to cut a model and run it on several devices, here or elsewhere",
}


class _Command(argparse.ArgumentParser):
    """Suggests the closest option for an unknown one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known = self._option_string_actions
        for word in args or ():
            name = word.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                close = difflib.get_close_matches(name, known, n=1)
                guess = f": did you mean {close[0]}?" if close else ""
                self.error(f"unrecognized argument {name}{guess}")
        return super().parse_known_args(args, namespace)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; without a command, print the help.

    Raises:
        SystemExit: an argument is wrong (status 2); usage and reason are printed to stderr.
    """
    script = Path(sys.argv[0]).name == "syncpipe"
    parser = argparse.ArgumentParser(
        prog="syncpipe" if script else "python -m syncpipe",
        description="Pipeline parallelism for PyTorch on one machine: one model on several "
        "devices, in two lines: Pipe(model, balance=[2, 2], chunks=8) and pipe.train_batch(...).",
        epilog="Each command has its own --help. To wrap and train your own model, see "
        "docs/tutorial.md.",
    )
    versions = f"PyTorch {metadata.version('torch')}, Python {platform.python_version()}"
    version = f"syncpipe {syncpipe.__version__} ({versions})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=_Command
    )
    for name, about in _COMMANDS.items():
        command = commands.add_parser(name, help=about)
        if name in (sys.argv[1:] if argv is None else argv):  # importing PyTorch takes seconds
            module = import_module(f"syncpipe.commands.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)

    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        print(f"\n{parser.prog} {args.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader, for example head, has closed its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER
    return status
