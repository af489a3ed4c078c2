"""``python -m tests.fuzz``: see :mod:`tests.fuzz.cases`."""

import sys

from tests.fuzz.cases import by_hand, check, drawn_case

sys.exit(min(1, by_hand("tests.fuzz", drawn_case, check)))
