"""SVG charts in plain Python: curves with intervals, for the docs.

A chart follows light and dark mode, says in words what it shows (for a screen reader), and gives each point's numbers
on hover. `line_chart` returns a whole `<svg>` element that may be saved as a `.svg` file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rlhf.errors import DataError
from rlhf.evaluation.wording import number_text, percent_text

#: Styles of every chart.
STYLE = """
.fig { --ink: #1d2330; --soft: #667085; --grid: #e4e7ec;
  --c0: #2563c9; --c1: #c2590a; --c2: #1d7f55; --c3: #7b46c9;
  --c4: #b3261e; --c5: #0e7c93; --c6: #8a6d00; --c7: #b83280;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; font-size: 12px; }
@media (prefers-color-scheme: dark) {
  .fig { --ink: #e6e9ef; --soft: #98a2b3; --grid: #2f3643;
    --c0: #74a7ff; --c1: #ffa657; --c2: #5fcf9b; --c3: #c4a1ff;
    --c4: #ff8f87; --c5: #5cc8de; --c6: #e0c050; --c7: #ff8ac4; } }
.fig text { fill: var(--soft); }
.fig .title { fill: var(--ink); font-size: 14px; font-weight: 600; }
.fig .grid { stroke: var(--grid); stroke-width: 1; }
.fig .axis { stroke: var(--soft); stroke-width: 1; }
.fig .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.fig .band { opacity: .16; stroke: none; }
.fig .hit { fill: transparent; }
"""

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 58, 38
#: Above the plot: where lines begin, the baseline of the second one, their pitch, and the width of a character.
_START, _SECOND, _LINE, _CHARACTER = 8, 40, 20, 6.7
_N_COLOURS = 8
_MAX_HOVER = 150


@dataclass(frozen=True, slots=True)
class Series:
    """Curve of a chart.

    Attributes:
        label: name in the legend; series of one label share a colour and an entry.
        x: `[N]` positions, ascending.
        y: `[N]` values; None or NaN leaves a gap.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(
                "x and y differ in length", where=f"series {self.label}", got=f"{len(self.x)}, {len(self.y)}"
            )

    @property
    def finite(self) -> list[tuple[float, float]]:
        """Points that have a value."""
        return [(float(x), float(y)) for x, y in zip(self.x, self.y, strict=True) if y is not None and math.isfinite(y)]


@dataclass(frozen=True, slots=True)
class Band:
    """Interval around the series of the same label.

    Attributes:
        label: of the series.
        x: `[N]` positions.
        low: `[N]` lower ends.
        high: `[N]` upper ends.
    """

    label: str
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def line_chart(
    series: Sequence[Series],
    title: str,
    x_label: str,
    y_label: str,
    bands: Sequence[Band] = (),
    *,
    percent: bool = False,
    y_range: tuple[float, float] | None = None,
    width: int = 560,
    height: int = 280,
) -> str:
    """Draw curves over one x axis.

    Args:
        series: curves, drawn in order.
        title: heading.
        x_label: what x counts.
        y_label: what y is, with its unit.
        bands: intervals around series.
        percent: write y in [0, 1] as percentages.
        y_range: fixed ends of the y axis; otherwise they fit the data.
        width: in pixels; the chart scales with its container.
        height: in pixels; a legend that needs lines of its own adds them.
    """
    write = percent_text if percent else number_text
    colour = _colours(series)
    legend = _legend(list(colour), y_label, width)
    above = _LINE * (len(legend) - 1)
    height += above
    frame = _Frame.around(series, bands, y_range, width, height, _TOP + above)
    body = [*_axes(frame, x_label, write), *_heading(title, y_label, legend, colour, width)]
    body += [_band(frame, band, colour[band.label]) for band in bands if band.label in colour]
    for one in series:
        body += _curve(frame, one, colour[one.label])
    for one in series:
        body += _hover(frame, one, x_label, write)
    return _svg(body, _words(title, series, x_label, write), width, height)


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
    """Centred moving average, its window cut at both ends; gaps stay gaps."""
    half = window // 2
    result: list[float | None] = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - half) : i + half + 1] if v is not None and math.isfinite(v)]
        result.append(sum(near) / len(near) if near else None)
    return result


def nice_ticks(low: float, high: float, n: int = 5) -> list[float]:
    """About `n` round tick values (1, 2 or 5 times a power of ten) from `low` to `high`, inclusive."""
    if not high > low:
        return [low]
    raw = (high - low) / n
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Data ranges and where they lie on the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float
    width: int
    height: int
    top: int

    @classmethod
    def around(
        cls,
        series: Sequence[Series],
        bands: Sequence[Band],
        y_range: tuple[float, float] | None,
        width: int,
        height: int,
        top: int,
    ) -> _Frame:
        points = [p for s in series for p in s.finite]
        xs = [x for x, _ in points] or [0.0, 1.0]
        ys = [y for _, y in points] + [y for b in bands for y in (*b.low, *b.high) if math.isfinite(y)]
        low, high = y_range or (min(ys, default=0.0), max(ys, default=1.0))
        if y_range is None:
            low = 0.0 if 0 <= low < high * 0.6 else low  # an axis from zero where it costs little
            # Rounding is no curve, and ticks closer than this would be written alike.
            pad = max((high - low) * 0.06 or abs(high) * 0.1 or 1.0, abs(high) * 0.005)
            low, high = (low if low == 0 and high > 0 else low - pad), high + pad
        x0, x1 = min(xs), max(xs)
        return cls(x0, x1 if x1 > x0 else x0 + 1, low, high, width, height, top)

    def x(self, value: float) -> float:
        return _LEFT + (self.width - _LEFT - _RIGHT) * (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        inside = min(max(value, self.y0), self.y1)
        return self.height - _BOTTOM - (self.height - self.top - _BOTTOM) * (inside - self.y0) / (self.y1 - self.y0)


def _colours(series: Sequence[Series]) -> dict[str, str]:
    labels = list(dict.fromkeys(s.label for s in series))
    return {label: f"var(--c{i % _N_COLOURS})" for i, label in enumerate(labels)}


def _axes(frame: _Frame, x_label: str, write: Callable[[float], str]) -> Iterator[str]:
    right, base = frame.width - _RIGHT, frame.height - _BOTTOM
    for value in nice_ticks(frame.y0, frame.y1):
        y = frame.y(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{write(value)}</text>'
    whole = [v for v in nice_ticks(frame.x0, frame.x1, 7) if v == int(v)] or [frame.x0, frame.x1]
    for value in whole:
        yield f'<text x="{frame.x(value):.1f}" y="{base + 17}" text-anchor="middle">{number_text(value)}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{base}" y2="{base}"/>'
    yield f'<text x="{(_LEFT + right) / 2:.1f}" y="{frame.height - 5}" text-anchor="middle">{escape(x_label)}</text>'


def _legend(labels: Sequence[str], y_label: str, width: int) -> list[Sequence[str]]:
    """Lines of legend entries; the first is shared with `y_label`, and empty if they overflow it."""
    whole = width - _RIGHT - _START
    if len(labels) < 2:
        return [()]
    if sum(map(_entry, labels)) <= whole - (_CHARACTER * len(y_label) + 16 if y_label else 0):
        return [labels]
    lines: list[list[str]] = [[]] if y_label else []
    room = 0.0
    for label in labels:
        if _entry(label) > room:
            lines.append([])
            room = whole
        lines[-1].append(label)
        room -= _entry(label)
    return [*lines]


def _heading(
    title: str,
    y_label: str,
    legend: Sequence[Sequence[str]],
    colour: dict[str, str],
    width: int,
) -> Iterator[str]:
    yield f'<text class="title" x="{_START}" y="20">{escape(title)}</text>'
    yield f'<text x="{_START}" y="{_SECOND}">{escape(y_label)}</text>'
    for i, labels in enumerate(legend):
        y, x = _SECOND + _LINE * i, max(_START, width - _RIGHT - sum(map(_entry, labels)))
        for label in labels:
            ends = f'x1="{x:.1f}" x2="{x + 14:.1f}" y1="{y - 4}" y2="{y - 4}"'
            mark = f'<line class="line" {ends} style="stroke:{colour[label]}"/>'
            yield f'{mark}<text x="{x + 19:.1f}" y="{y}">{escape(label)}</text>'
            x += _entry(label)


def _entry(label: str) -> float:
    """Width of a legend entry; fonts differ, so it is generous."""
    return 36 + _CHARACTER * len(label)


def _curve(frame: _Frame, series: Series, paint: str) -> Iterator[str]:
    for run in _runs(series):
        d = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in run)
        yield f'<polyline class="line" points="{d}" style="stroke:{paint}"/>'
        if len(run) == 1:  # a line of one point is invisible
            yield f'<circle cx="{frame.x(run[0][0]):.1f}" cy="{frame.y(run[0][1]):.1f}" r="3" style="fill:{paint}"/>'


def _runs(series: Series) -> Iterator[list[tuple[float, float]]]:
    """Split a curve at its gaps."""
    run: list[tuple[float, float]] = []
    for x, y in zip(series.x, series.y, strict=True):
        if y is not None and math.isfinite(y):
            run.append((float(x), float(y)))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _band(frame: _Frame, band: Band, paint: str) -> str:
    ends = [(frame.x(x), frame.y(a), frame.y(b)) for x, a, b in zip(band.x, band.low, band.high, strict=True)]
    there = [f"{x:.1f},{b:.1f}" for x, _, b in ends]
    back = [f"{x:.1f},{a:.1f}" for x, a, _ in reversed(ends)]
    return f'<polygon class="band" points="{" ".join(there + back)}" style="fill:{paint}"/>'


def _hover(frame: _Frame, series: Series, x_label: str, write: Callable[[float], str]) -> Iterator[str]:
    points = series.finite
    for x, y in points[:: max(1, -(-len(points) // _MAX_HOVER))]:
        words = f"{series.label}, {x_label} {number_text(x)}: {write(y)}"
        at = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}"'
        yield f'<circle class="hit" {at} r="7"><title>{escape(words)}</title></circle>'


def _words(title: str, series: Sequence[Series], x_label: str, write: Callable[[float], str]) -> str:
    parts = []
    for one in series:
        if points := one.finite:
            (x0, y0), (x1, y1) = points[0], points[-1]
            parts.append(
                f"{one.label}: {write(y0)} at {x_label} {number_text(x0)}, {write(y1)} at {x_label} {number_text(x1)}"
            )
    return f"{title}. {'; '.join(parts) or 'No data'}."


def _svg(body: Sequence[str], words: str, width: int, height: float) -> str:
    size = f'width="{width}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fig" role="img" aria-label="{escape(words)}" '
        f'viewBox="0 0 {width} {height}" {size}><style>{STYLE}</style>{"".join(body)}</svg>'
    )
