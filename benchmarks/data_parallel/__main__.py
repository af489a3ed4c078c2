"""``python -m benchmarks.data_parallel``."""

import sys

from benchmarks.data_parallel.parts import GROUP

if __name__ == "__main__":  # processes of their own import this, too
    sys.exit(GROUP.main())
