"""``python -m benchmarks.memory``."""

import sys

from benchmarks.memory.parts import GROUP

if __name__ == "__main__":
    sys.exit(GROUP.main())
