"""``python -m benchmarks.papers``."""

import sys

from benchmarks.papers.parts import GROUP

if __name__ == "__main__":  # processes of their own import this, too
    sys.exit(GROUP.main())
