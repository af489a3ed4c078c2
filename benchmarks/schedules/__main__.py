"""``python -m benchmarks.schedules``."""

import sys

from benchmarks.schedules.parts import main

sys.exit(main())
