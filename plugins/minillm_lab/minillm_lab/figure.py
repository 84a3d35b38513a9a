"""Two SVG figures: a line chart, and a chart of effects with their intervals.

Elements carry CSS classes only; the page's style sheet sets colours for light and dark mode. The end of
the file has the axes: round ticks, and units that keep labels short.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from minillm_lab.markup import Markup, tag

COLOURS, DASHES = 7, 3
MOST_HITS = 40  # points of a line that have tooltips
LETTER, BOLD = 6.9, 7.9  # maximum width of a character

Point = tuple[float, float]


@dataclass(frozen=True)
class Size:
    """The size of a figure, in the same units as character widths."""

    width: float
    height: float


WIDE, NARROW = Size(540, 320), Size(358, 270)


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    label: str  # shown in tooltips
    colour: int  # 0: the reference; 1 ...: the others
    points: Sequence[Point]
    faint: bool = False
    dots: bool = False  # mark each point


@dataclass(frozen=True)
class Interval:
    """An effect with its interval: one row of the chart."""

    label: str
    effect: float | None  # None: not available; the note holds the reason
    low: float | None = None
    high: float | None = None
    verdict: str = "unknown"  # "better", "worse", "unknown"
    words: str = ""  # the numbers as text
    note: str = ""


def colour(number: int) -> str:
    """Return the CSS classes of a colour; numbers beyond the last colour repeat them, dashed."""
    if number == 0:
        return "c0"
    turn, which = divmod(number - 1, COLOURS)
    dash = f" d{(turn - 1) % DASHES + 1}" if turn else ""
    return f"c{which + 1}{dash}"


def line_chart(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    size: Size = WIDE,
    *,
    level: float | None = None,
    from_zero: bool = True,
    note: str = "",
) -> Markup:
    """Draw lines in one pair of axes; skip points that are not finite.

    Args:
        lines: drawn in this order.
        x: the lower axis.
        y: the left axis; it begins near the smallest value.
        size: of the figure.
        level: a value of y marked by a horizontal line.
        from_zero: start x at 0.
        note: describes the figure to screen readers.
    """
    kept = [(line, [p for p in line.points if all(map(math.isfinite, p))]) for line in lines]
    points = [point for _, some in kept for point in some]
    if not points:
        return tag("p", "There is nothing to draw.", class_="empty")
    (x_by, x_name), (y_by, y_name) = (
        axis.unit(max(abs(point[i]) for point in points)) for i, axis in enumerate((x, y))
    )
    xs = [px / x_by for px, _ in points] + ([0.0] if from_zero else [])
    ys = [py / y_by for _, py in points] + ([] if level is None else [level])
    down = scale_of(ys, size.height - 42, 30)
    marks = ticks(down.low, down.high, 6 if size.height > 300 else 5)
    labels = [number(mark, _step(marks)) for mark in marks]
    left = 12 + LETTER * max(map(len, labels), default=1)
    across = scale_of(xs, left, size.width - 14, room=0.0)
    return tag(
        "svg",
        tag("text", y_name, x=0.0, y=13.0, class_="axis"),
        *_level_lines(marks, labels, down, left, size.width - 14),
        *_bottom(across, down.start, x_name, 7 if size.width > 500 else 5),
        None
        if level is None
        else tag("line", **_flat(down(level), left, size.width - 14), class_="level"),
        *(
            _line(line, [(across(px / x_by), down(py / y_by)) for px, py in some], some)
            for line, some in kept
            if some
        ),
        viewBox=f"0 0 {size.width:g} {size.height:g}",
        role="img",
        aria_label=note or f"{y_name} against {x_name}",
    )


def interval_chart(
    rows: Sequence[Interval], x: Axis, *, reference: float = 0.0, width: float = 358
) -> Markup:
    """Draw a row for each effect: its numbers as text, a dot, the interval, and the line of no effect.

    Args:
        rows: from top to bottom.
        x: the axis.
        reference: the value of no effect.
        width: of the figure.
    """
    some = [v for row in rows for v in (row.effect, row.low, row.high) if v is not None]
    across = scale_of([*some, reference], 8, width - 8)
    body: list[Markup] = []
    top = 4.0
    for row in rows:
        height = 44.0 if row.effect is not None else 24.0
        height += 14.0 if row.note else 0.0
        body.append(tag("g", *_row(row, across, top, width), class_=row.verdict))
        top += height
    marks = ticks(across.low, across.high, 4)
    bottom = top + 4
    return tag(
        "svg",
        *(tag("line", x1=across(m), x2=across(m), y1=4.0, y2=bottom, class_="grid") for m in marks),
        tag("line", x1=across(reference), x2=across(reference), y1=0.0, y2=bottom, class_="level"),
        *body,
        *_bottom(across, bottom, x.name, 4, middle=False),
        viewBox=f"0 0 {width:g} {bottom + 42:g}",
        role="img",
        aria_label=f"{x.name}: " + "; ".join(f"{row.label} {row.words} {row.note}" for row in rows),
    )


def _row(row: Interval, across: Scale, top: float, width: float) -> Iterator[Markup]:
    room = int((width - LETTER * (len(row.words) + 1)) / BOLD)
    yield tag("title", f"{row.label}: {row.words} {row.note}")
    yield tag("text", _cut(row.label, max(room, 8)), x=0.0, y=top + 14, class_="name")
    yield tag("text", row.words, x=width, y=top + 14, class_="end told")
    if row.effect is not None:
        y = top + 29
        if row.low is not None and row.high is not None:
            low, high = across(row.low), across(row.high)
            yield tag("line", x1=low, x2=high, y1=y, y2=y, class_="whisker")
            for end in (low, high):
                yield tag("line", x1=end, x2=end, y1=y - 4, y2=y + 4, class_="whisker")
        yield tag("circle", cx=across(row.effect), cy=y, r=4.5, class_="effect")
    if row.note:
        below = top + (48 if row.effect is not None else 28)
        yield tag("text", _cut(row.note, int(width / 5.6)), x=0.0, y=below, class_="note")


def _line(line: Line, places: Sequence[Point], points: Sequence[Point]) -> Markup:
    every = max(1, math.ceil(len(points) / MOST_HITS))
    last = places[-1]
    shown = places if line.dots else () if line.faint else (last,)
    hits = [] if line.faint else list(zip(places, points, strict=True))[::-1][::every]
    return tag(
        "g",
        tag("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in places), class_="line"),
        *(tag("circle", cx=a, cy=b, r=2.6, class_="dot") for a, b in shown),
        *(
            tag(
                "circle",
                tag("title", f"{line.label}: {py:.5g} at {px:,.6g}"),
                cx=a,
                cy=b,
                r=6.0,
                class_="hit",
            )
            for (a, b), (px, py) in hits
        ),
        class_=f"{colour(line.colour)}{' faint' if line.faint else ''}",
    )


def _level_lines(
    marks: Sequence[float], labels: Sequence[str], down: Scale, left: float, right: float
) -> Iterator[Markup]:
    for mark, label in zip(marks, labels, strict=True):
        y = down(mark)
        yield tag("line", **_flat(y, left, right), class_="grid")
        yield tag("text", label, x=left - 7, y=y + 4, class_="tick end")


def _bottom(
    across: Scale, y: float, name: str, most: int, *, middle: bool = True
) -> Iterator[Markup]:
    """Draw the lower axis: a line, ticks with labels, and its name."""
    left, right = across.start, across.end
    marks = ticks(across.low, across.high, most)
    yield tag("line", **_flat(y, left, right), class_="base")
    for mark in marks:
        x, label = across(mark), number(mark, _step(marks))
        half = LETTER * len(label) / 2  # a label at an end stays within the figure
        at = min(max(x, half), right + 14 - half)
        yield tag("line", x1=x, x2=x, y1=y, y2=y + 4, class_="base")
        yield tag("text", label, x=at, y=y + 17, class_="tick middle")
    centre = (left + right) / 2 if middle else left
    yield tag("text", name, x=centre, y=y + 35, class_="axis middle" if middle else "axis")


def _flat(y: float, left: float, right: float) -> dict[str, float]:
    return {"x1": left, "x2": right, "y1": y, "y2": y}


def _step(marks: Sequence[float]) -> float:
    return marks[1] - marks[0] if len(marks) > 1 else abs(marks[0]) or 1.0 if marks else 1.0


def _cut(label: str, letters: int) -> str:
    return label if len(label) <= letters else label[: letters - 1] + "…"


# Axes

Units = Sequence[tuple[float, str]]  # (size, name), the largest first

COUNT: Units = ((1e12, "trillions"), (1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
TIME: Units = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
BYTES: Units = ((2.0**30, "GiB"), (2.0**20, "MiB"))

_ROUND = (1.0, 2.0, 5.0, 10.0)
_NARROWEST = 1e-6  # relative range; below it floats cannot represent the ticks


@dataclass(frozen=True)
class Axis:
    """An axis; its tick labels use the largest unit that fits."""

    name: str  # "tokens", "held-out loss, nats a token"
    units: Units = ()

    def unit(self, largest: float) -> tuple[float, str]:
        """Choose the (size, heading) of numbers up to ``largest``."""
        for size, name in self.units:
            if largest >= size:
                return size, f"{self.name}, {name}"
        if self.units and self.units is not COUNT:
            size, name = self.units[-1]
            return size, f"{self.name}, {name}"
        return 1.0, self.name


TOKENS, SECONDS = Axis("tokens", COUNT), Axis("time of training", TIME)


@dataclass(frozen=True)
class Scale:
    """A linear map from values in low..high to coordinates in start..end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def scale_of(values: Iterable[float], start: float, end: float, *, room: float = 0.05) -> Scale:
    """Build a scale that contains all values, with ``room`` at both ends and never zero width."""
    found = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(found), max(found)
    size = max(abs(low), abs(high))
    least = (size * _NARROWEST if high > low else size / 10) or 1.0
    if high - low < least:
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
    spare = room * (high - low)
    return Scale(low - spare, high + spare, start, end)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """List the multiples of 1, 2 or 5 times a power of ten within low..high, at most ``most`` + 1."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(by for by in _ROUND if by * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [min(max(n * step, low), high) for n in range(first, last + 1)]


def number(value: float, step: float) -> str:
    """Format a tick label with the decimals needed for ticks ``step`` apart."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 6 or abs(value) >= 1e9:
        digits = 1 + max(0, math.ceil(math.log10(max(abs(value), step) / step) - 1e-9))
        return f"{value if abs(value) > step / 2 else 0:.{digits}g}".replace("-", "−")
    words = f"{value:,.{decimals}f}"
    return words.lstrip("-") if not float(words.replace(",", "")) else words.replace("-", "−")
