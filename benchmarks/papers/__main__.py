"""``python -m benchmarks.papers``."""

import sys

from benchmarks.papers.tables import main

sys.exit(main())
