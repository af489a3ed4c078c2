"""``python -m tests.fuzz``: see :mod:`tests.fuzz.cases`."""

import sys

from tests.fuzz.cases import drawn_case
from tests.fuzz.command import by_hand
from tests.fuzz.runs import check

sys.exit(min(1, by_hand("tests.fuzz", drawn_case, check)))
