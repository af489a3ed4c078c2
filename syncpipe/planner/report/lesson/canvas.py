"""What a picture is drawn on: SVG as text, in colours that suit light and dark.

Colours are classes, so that a style sheet can turn them over where the reader prefers dark. Nothing
is needed to look at the result but a browser: no script, no font, no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["BOTTOM", "GUTTER", "RIGHT", "WIDTH", "Canvas", "clean", "fitted", "wrapped"]

#: Pixels: the picture, what stands left of the charts and right of them, and below the last one.
WIDTH, GUTTER, RIGHT, BOTTOM = 1120, 110, 120, 24

#: A letter is so wide, in ems, on the safe side.
_LETTER = 0.56

_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial,
       sans-serif; font-size: 12px; }
.h1 { font-size: 21px; font-weight: 600; } .h2 { font-size: 16px; font-weight: 600; }
.big { font-size: 19px; font-weight: 600; } .small { font-size: 11px; } .tiny { font-size: 9.5px; }
.bold { font-weight: 600; } .end { text-anchor: end; } .mid { text-anchor: middle; }
.ink { fill: #1d1f24; } .faint { fill: #5d6270; } .paper { fill: #ffffff; }
.lane { fill: #e9eaee; } .band { fill: #f3f4f7; } .band2 { fill: #e6e9f0; }
.rule { stroke: #c3c7d1; fill: none; } .cut { stroke: #5d6270; fill: none; }
.forward { fill: #8fb4e3; } .backward { fill: #2f6db5; } .weights { fill: #b98a2e; }
.stored { fill: #e3bb66; } .fixed { fill: #8d93a3; } .held { fill: #e0a63d; }
.limit { stroke: #c8352b; stroke-dasharray: 5 3; fill: none; } .alarm { fill: #c8352b; }
.mine { fill: #1a8a78; } .other { fill: #a9afbd; }
.hatched { fill: url(#hatch); }
.dark { fill: #1b1d22; } .light { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
  .ink { fill: #e8eaf0; } .faint { fill: #a2a8b8; } .paper { fill: #16181d; }
  .lane { fill: #2a2d36; } .band { fill: #1e2128; } .band2 { fill: #272b34; }
  .rule { stroke: #434857; } .cut { stroke: #a2a8b8; }
  .forward { fill: #9cc0ee; } .backward { fill: #4a86cf; }
  .fixed { fill: #6f7687; } .limit { stroke: #ff7468; } .alarm { fill: #ff8479; }
  .mine { fill: #35b39d; } .other { fill: #59606f; }
}
"""

_HATCH = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<path d="M-1 6L6 -1M-1 1L1 -1M4 6L6 4" stroke="#1d1f24" stroke-opacity="0.45"/>'
    "</pattern></defs>"
)


class Canvas:
    """Elements one after another; ``y`` is where the next section begins."""

    def __init__(self) -> None:
        self.y = 0.0
        self._elements: list[str] = []
        self._style = [_STYLE]

    def style(self, rule: str) -> None:
        """Adds to the style sheet."""
        self._style.append(rule)

    def text(self, x: float, y: float, text: str, look: str = "ink", title: str = "") -> None:
        """A line of text; ``title`` shows where the pointer rests."""
        self._add(f'text x="{_n(x)}" y="{_n(y)}"', look, f"{clean(text)}{_title(title)}", "text")

    def turned(self, x: float, y: float, text: str, look: str, title: str = "") -> None:
        """Text that goes up to the right and ends here."""
        where = f'text x="{_n(x)}" y="{_n(y)}" transform="rotate(-50 {_n(x)} {_n(y)})"'
        self._add(where, look, f"{clean(text)}{_title(title)}", "text")

    def box(
        self, x: float, y: float, width: float, height: float, look: str, title: str = ""
    ) -> None:
        """A filled box."""
        size = f'width="{_n(max(width, 0))}" height="{_n(max(height, 0))}"'
        self._add(f'rect x="{_n(x)}" y="{_n(y)}" {size}', look, _title(title), "rect")

    def boxes(self, boxes: Iterable[tuple[float, float, float, float]], look: str) -> None:
        """Many boxes of one look, as one element."""
        path = "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h-{_n(w)}z" for x, y, w, h in boxes)
        self._add(f'path d="{path}"', look, "", "path")

    def line(self, points: Sequence[tuple[float, float]], look: str) -> None:
        """From point to point; filled, if the look is."""
        (x, y), *rest = points
        path = f"M{_n(x)} {_n(y)}" + "".join(f"L{_n(a)} {_n(b)}" for a, b in rest)
        self._add(f'path d="{path}"', look, "", "path")

    def steps(self, points: Sequence[tuple[float, float]], floor: float, look: str) -> None:
        """What lies below a line that goes to the right and up or down, down to the floor."""
        path = f"M{_n(points[0][0])} {_n(floor)}"
        path += "".join(f"H{_n(x)}V{_n(y)}" for x, y in points)
        self._add(f'path d="{path}V{_n(floor)}z"', look, "", "path")

    def heading(self, text: str, words: str) -> None:
        """Begins a section, with a sentence or two about it."""
        self.y += 34
        self.text(16, self.y, text, "h2 ink")
        for line in wrapped(words, WIDTH - 32, 12):
            self.y += 17
            self.text(16, self.y, line, "faint")
        self.y += 14

    def svg(self, label: str) -> str:
        """The whole picture."""
        height = _n(self.y + BOTTOM)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" aria-label="{clean(label)}">'
            f"{_HATCH}<style>{''.join(self._style)}</style>"
            f'<rect class="paper" width="100%" height="100%"/>{"".join(self._elements)}</svg>\n'
        )

    def _add(self, start: str, look: str, inside: str, name: str) -> None:
        end = f">{inside}</{name}>" if inside else "/>"
        self._elements.append(f'<{start} class="{look}"{end}\n')


def fitted(text: str, width: float, size: float) -> str:
    """As much of a text as has room, the middle left out; nothing, if that would be next to it."""
    most = int(width / (_LETTER * size))
    if len(text) <= most:
        return text
    if most < 4:
        return ""
    return f"{text[: (most - 1) // 2]}..{text[len(text) - (most - 2) // 2 :]}"[:most]


def wrapped(text: str, width: float, size: float) -> list[str]:
    """A text as lines."""
    most, lines = int(width / (_LETTER * size)), [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _n(number: float) -> str:
    """As few digits as a picture needs."""
    return f"{number:.2f}".rstrip("0").rstrip(".") if number % 1 else str(int(number))


def _title(text: str) -> str:
    return f"<title>{clean(text)}</title>" if text else ""


def clean(text: str) -> str:
    """Text for XML and HTML, without what these cannot hold."""
    return escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text))
