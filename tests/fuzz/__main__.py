"""``python -m tests.fuzz`` and ``python -m tests.fuzz lives``: see :mod:`tests.fuzz.command`."""

import sys

from tests.fuzz import lives
from tests.fuzz.cases import drawn_case
from tests.fuzz.command import by_hand
from tests.fuzz.runs import check

if sys.argv[1:2] == ["lives"]:
    arguments = sys.argv[2:]
    failed = by_hand("tests.fuzz lives", lives.drawn_story, lives.check, arguments, lives.shrunk)
else:
    failed = by_hand("tests.fuzz", drawn_case, check)
sys.exit(min(1, failed))
