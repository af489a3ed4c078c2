"""``python -m syncpipe``; see :mod:`syncpipe.commands.main`."""

import sys

from syncpipe.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
