"""``python -m benchmarks.schedules``."""

import sys

from benchmarks.schedules.parts import GROUP

if __name__ == "__main__":  # processes of their own import this, too
    sys.exit(GROUP.main())
