"""The model as bars, layer by layer, and where it is cut."""

from __future__ import annotations

from itertools import accumulate, pairwise

from syncpipe.balance.profile import in_bytes
from syncpipe.planner.costs.chain import Chain
from syncpipe.planner.report.lesson.canvas import GUTTER, RIGHT, WIDTH, Canvas, fitted
from syncpipe.planner.report.rivals import duration
from syncpipe.planner.schedules.layouts import placement
from syncpipe.planner.search.candidate import Candidate

__all__ = ["draw_layers"]

_HEIGHT, _LABELS, _NAMES = 92, 40, 110
#: Bars narrower than this have no name below them, in pixels.
_ROOM = 13
#: A letter of a name is so wide.
_LETTER = 5.3


def draw_layers(canvas: Canvas, chain: Chain, names: list[str], chosen: Candidate) -> None:
    """Bars of time, and bars of memory, above and below a row of stages.

    Args:
        canvas: to draw on.
        chain: the layers, for one micro-batch.
        names: of the layers.
        chosen: says where the cuts are.
    """
    step = (WIDTH - GUTTER - RIGHT) / len(chain)
    times = [f + b for f, b in zip(chain.forward, chain.backward, strict=True)]
    own = [max(0.0, s - t) for s, t in zip(chain.stored, chain.shared or chain.stored, strict=True)]
    sizes = [a + b for a, b in zip(chain.fixed, own, strict=True)]
    top = canvas.y + _LABELS
    below = top + _HEIGHT + 30
    short = _shortened(names)
    longest = max(map(len, short)) * _LETTER
    turned = step >= _ROOM and longest > step
    _bands(canvas, chain, names, chosen, step)
    for k, name in enumerate(names):
        width = max(step * 0.82, 0.6)
        x = GUTTER + (k + 0.5) * step - width / 2
        said = (
            f"{name}: forward {duration(chain.forward[k])}, "
            f"backward {duration(chain.backward[k])}; stored for backward {in_bytes(own[k])}, "
            f"parameters and what goes with them {in_bytes(chain.fixed[k])}"
        )
        _pair(canvas, x, top, width, (chain.backward[k], chain.forward[k]), max(times), said,
              ("backward", "forward"))  # fmt: skip
        _pair(canvas, x, below, width, (chain.fixed[k], own[k]), max(sizes), said,
              ("fixed", "stored"))  # fmt: skip
        if not turned and longest <= step:
            canvas.text(x + width / 2, below + _HEIGHT + 12, short[k], "tiny mid faint", name)
        elif turned:
            canvas.turned(x + width / 2 + 3, below + _HEIGHT + 9, fitted(short[k], _NAMES, 9.5),
                          "tiny end faint", name)  # fmt: skip
    for y, what, most in (
        (top, "time", duration(max(times))),
        (below, "memory", in_bytes(max(sizes))),
    ):
        canvas.text(GUTTER - 10, y + _HEIGHT / 2, what, "end bold ink")
        canvas.text(GUTTER - 10, y + 10, most, "small end faint")
        canvas.line([(GUTTER, y + _HEIGHT), (WIDTH - RIGHT, y + _HEIGHT)], "rule")
    x = WIDTH - RIGHT + 12
    for y, look, word in (
        (top, "forward", "forward"),
        (top + 18, "backward", "backward"),
        (below, "stored", "stored, 1 of"),
        (below + 30, "fixed", "parameters,"),
    ):
        canvas.box(x, y, 11, 11, look)
        canvas.text(x + 16, y + 10, word, "small ink")
    canvas.text(x + 16, below + 22, f"{chosen.chunks} micro-b.", "small ink")
    canvas.text(x + 16, below + 52, "gradients,", "small ink")
    canvas.text(x + 16, below + 64, "optimizer", "small ink")
    canvas.y = below + _HEIGHT + (min(_NAMES, longest) * 0.77 + 10 if turned else 16)


def _shortened(names: list[str]) -> list[str]:
    """Without the parts that all names begin with, which tell none from the other."""
    parts = [name.split(".") for name in names]
    while len(parts) > 1 and min(map(len, parts)) > 1 and len({part[0] for part in parts}) == 1:
        parts = [rest for _, *rest in parts]
    return [".".join(part) for part in parts]


def _pair(
    canvas: Canvas,
    x: float,
    y: float,
    width: float,
    parts: tuple[float, float],
    most: float,
    said: str,
    looks: tuple[str, str],
) -> None:
    """Two parts of a bar, the first one below."""
    floor = y + _HEIGHT
    for part, look in zip(parts, looks, strict=True):
        height = _HEIGHT * part / most if most else 0.0
        floor -= height
        if height > 0:
            canvas.box(x, floor, width, height, look, said)


def _bands(canvas: Canvas, chain: Chain, names: list[str], chosen: Candidate, step: float) -> None:
    """The stages, behind the bars."""
    device_of = placement(chosen.simulation.schedule)
    costs = chosen.simulation.costs
    height = _LABELS + 2 * _HEIGHT + 36
    for s, (i, j) in enumerate(pairwise(accumulate(chosen.balance, initial=0))):
        x, width = GUTTER + i * step, (j - i) * step
        canvas.box(x, canvas.y, width, height, "band2" if s % 2 else "band")
        if s:
            canvas.line([(x, canvas.y), (x, canvas.y + height)], "cut")
        time = costs.forward[s] + costs.backward_input[s] + costs.backward_weight[s]
        again = ", recomputes" * chosen.recomputes[s]
        said = (
            f"stage {s} on device {device_of[s]}: {names[i]} to {names[j - 1]}, {j - i} layers, "
            f"{duration(time)} for a micro-batch{again}"
        )
        for y, what, number in ((15, "stage", s), (29, "device", device_of[s])):
            word = f"{what} {number}"
            if fitted(word, width + 6, 11) != word:
                word = str(number) if what == "stage" else f"d{number}"
            canvas.text(x + width / 2, canvas.y + y, word, "small mid ink", said)
        middle = canvas.y + _LABELS + _HEIGHT + 18
        canvas.text(x + width / 2, middle, fitted(duration(time), width, 11), "small mid faint",
                    said)  # fmt: skip
