"""``python -m benchmarks.planning``."""

import sys

from benchmarks.planning.parts import GROUP

if __name__ == "__main__":  # processes of their own import this, too
    sys.exit(GROUP.main())
