"""``python -m benchmarks.peers``."""

import sys

from benchmarks.peers.parts import main

sys.exit(main())
