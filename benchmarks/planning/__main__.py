"""``python -m benchmarks.planning``."""

import sys

from benchmarks.planning.parts import main

sys.exit(main())
