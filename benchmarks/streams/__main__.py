"""``python -m benchmarks.streams``."""

import sys

from benchmarks.streams.parts import GROUP

if __name__ == "__main__":
    sys.exit(GROUP.main())
