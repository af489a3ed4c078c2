"""``python -m benchmarks.papers``."""

import sys

from benchmarks.papers.parts import main

sys.exit(main())
