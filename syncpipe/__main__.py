"""Command line: ``python -m syncpipe COMMAND``."""

import argparse
import sys
from collections.abc import Sequence

from syncpipe.commands import demo, demo_options
from syncpipe.commands import plan as plan_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: what follows ``python -m syncpipe``; by default that of this process.

    Returns:
        The exit status: 0 for success.

    Raises:
        SystemExit: with status 2 for a wrong argument, after usage and reason went to stderr.
    """
    parser = argparse.ArgumentParser(
        prog="python -m syncpipe",
        description="Pipeline parallelism for PyTorch on one machine.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    about = "train a small ResNeXt on handwritten digits through a pipe"
    command = commands.add_parser("demo", help=about, description=demo.__doc__)
    demo_options.add_arguments(command)
    command.set_defaults(run=demo.run)

    about = "find how to cut a model and run it on several devices, here or elsewhere"
    command = commands.add_parser("plan", help=about)
    plan_command.add_arguments(command)
    command.set_defaults(run=plan_command.run)

    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
