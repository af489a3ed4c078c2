"""``python -m benchmarks.peers``."""

import sys

from benchmarks.peers.parts import GROUP

if __name__ == "__main__":  # processes of their own import this, too
    sys.exit(GROUP.main())
