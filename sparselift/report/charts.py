"""Charts as inline SVG, drawn with CSS variables so that one picture suits a light and a dark page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 760
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 22, 46
_SERIES = 8                        # colours --s0 .. --s7 of the page's style


@dataclass(frozen=True, slots=True)
class Point:
    """One trial of a search curve. `ratio` is native time / its time, in [`low`, `high`]; None where it was not measured."""

    number: int
    label: str
    state: str                     # "complete", "pruned", "infeasible", "failed"
    ratio: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar with an interval; `note` stands at its end."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps data in [low, high] to pixels in [start, stop]."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round numbers inside the range: multiples of 1, 2 or 5 times a power of ten."""
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def search_curve(points: Sequence[Point]) -> str:
    """Speed-up over native of every trial, and the best so far. Trials without a measurement are crosses at the foot."""
    height = 320
    measured = [point for point in points if point.ratio is not None]
    numbers = [point.number for point in points]
    ratios = [1.0, *(point.ratio for point in measured if point.ratio is not None)]
    low, high = _span(ratios, [end for point in measured for end in (point.low, point.high) if end is not None])
    margin = max(0.05, (high - low) * 0.08)
    x = Scale(min(numbers) - 0.5, max(numbers) + 0.5, _LEFT, WIDTH - _RIGHT)
    y = Scale(max(0.0, low - margin), high + margin, height - _BOTTOM, _TOP)
    parts = [_grid_y(y, lambda value: f"{value:g}×"), _whole_ticks_x(x, height), _axis_titles(height, "trial", "speed-up over native")]
    parts.append(f'<line class="native" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(1):.1f}" y2="{y(1):.1f}"/>')
    parts.append(f'<text class="small" x="{WIDTH - _RIGHT}" y="{y(1) - 5:.1f}" text-anchor="end">native</text>')
    parts.append(_best_line(measured, x, y))
    for point in points:
        value = "not measured" if point.ratio is None else f"{point.ratio:.2f}× native"
        title = f"<title>{escape(f'trial {point.number}, {point.label}: {point.state}, {value}')}</title>"
        if point.ratio is None:
            cx, cy = x(point.number), height - _BOTTOM - 6
            parts.append(f'<path class="cross" d="M{cx - 4:.1f} {cy - 4:.1f}l8 8m0 -8l-8 8">{title}</path>')
        else:
            if point.low is not None and point.high is not None:
                foot, head = max(point.low, y.low), min(point.high, y.high)
                parts.append(f'<path class="interval" d="M{x(point.number):.1f} {y(foot):.1f}V{y(head):.1f}"/>')
            parts.append(f'<circle class="trial {escape(point.state)}" cx="{x(point.number):.1f}" cy="{y(point.ratio):.1f}" r="4">{title}'
                         "</circle>")
    return _svg(height, "Search curve: speed-up over native by trial", parts)


def bars(rows: Sequence[Bar], unit: str, label: str, start: float = 0.0) -> str:
    """Horizontal bars with their intervals, from `start`: 0 for amounts, 1 for ratios whose neutral value is 1."""
    if not rows:
        return ""
    left, note = _label_width([row.label for row in rows]), 150
    height = 30 * len(rows) + 40
    low, high = _span([start, *(row.value for row in rows)], [end for row in rows for end in (row.low, row.high) if end is not None])
    x = Scale(low, high if high > low else low + 1.0, left, WIDTH - note)
    parts = [_grid_x(x, height - 26, unit)]
    for index, row in enumerate(rows):
        top = 8 + 30 * index
        begin, end = sorted((x(start), x(row.value)))
        parts.append(f'<text class="label" x="{left - 10}" y="{top + 15}" text-anchor="end">{escape(row.label)}</text>')
        parts.append(f'<rect class="bar{" worse" if row.value < start else ""}" x="{begin:.1f}" y="{top + 2}" '
                     f'width="{max(end - begin, 1):.1f}" height="18" rx="3"/>')
        if row.low is not None and row.high is not None:
            left_end, right_end = max(row.low, x.low), min(row.high, x.high)
            caps = "".join(f"M{x(each):.1f} {top + 7}v8" for each in (row.low, row.high) if x.low <= each <= x.high)
            parts.append(f'<path class="whisker" d="M{x(left_end):.1f} {top + 11}H{x(right_end):.1f}{caps}"/>')
        edge = max(end, x(min(row.high, x.high)) if row.high is not None else end)
        parts.append(f'<text class="note" x="{edge + 8:.1f}" y="{top + 15}">{escape(row.note)}</text>')
    return _svg(height, label, parts)


def stacked(rows: Mapping[str, Mapping[str, float]], unit: str, label: str) -> str:
    """One stacked bar a row, the same series in the same order and colour in each, and a legend below."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    left = _label_width(list(rows))
    legend_rows = math.ceil(len(names) / 4)
    body = 40 * len(rows)
    height = body + 44 + 20 * legend_rows
    x = Scale(0.0, max([1e-12, *(sum(parts.values()) for parts in rows.values())]), left, WIDTH - 90)
    parts = [_grid_x(x, body + 8, unit)]
    for index, (row, values) in enumerate(rows.items()):
        top, reached = 8 + 40 * index, 0.0
        parts.append(f'<text class="label" x="{left - 10}" y="{top + 18}" text-anchor="end">{escape(row)}</text>')
        for name, value in values.items():
            parts.append(f'<rect class="s{names.index(name) % _SERIES}" x="{x(reached):.1f}" y="{top}" '
                         f'width="{x(reached + value) - x(reached):.1f}" height="26"><title>{escape(f"{row}, {name}: {value:.3g} {unit}")}'
                         "</title></rect>")
            reached += value
        parts.append(f'<text class="note" x="{x(reached) + 8:.1f}" y="{top + 18}">{reached:.3g} {escape(unit)}</text>')
    for index, name in enumerate(names):
        cx, cy = left + (index % 4) * 160, body + 50 + 20 * (index // 4)
        parts.append(f'<rect class="s{index % _SERIES}" x="{cx}" y="{cy - 10}" width="12" height="12" rx="2"/>'
                     f'<text class="small" x="{cx + 18}" y="{cy}">{escape(name)}</text>')
    return _svg(height, label, parts)


def _span(values: Sequence[float], ends: Sequence[float]) -> tuple[float, float]:
    """What a scale shows: all values, and the ends of intervals as far as half the values' own span beyond them.

    One interval from a disturbed measurement would else press everything into a corner. An end that is outside is drawn open.
    """
    low, high = min(values), max(values)
    room = max(high - low, abs(high) * 0.2) / 2
    return min(low, max(low - room, min(ends, default=low))), max(high, min(high + room, max(ends, default=high)))


def _best_line(measured: Sequence[Point], x: Scale, y: Scale) -> str:
    path, best = "", -math.inf
    for point in sorted(measured, key=lambda each: each.number):
        if point.state != "complete" or point.ratio is None:
            continue
        if not path:
            path = f"M{x(point.number):.1f} {y(point.ratio):.1f}"
        best = max(best, point.ratio)
        path += f"H{x(point.number):.1f}V{y(best):.1f}"
    return f'<path class="best" d="{path}H{x.stop:.1f}"/>' if path else ""


def _grid_y(y: Scale, text: Callable[[float], str]) -> str:
    lines = [f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
             f'<text class="small" x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{text(tick)}</text>'
             for tick in y.ticks()]
    return "".join(lines)


def _whole_ticks_x(x: Scale, height: int) -> str:
    ticks = sorted({round(tick) for tick in x.ticks(10) if tick >= 0})
    return "".join(f'<text class="small" x="{x(tick):.1f}" y="{height - _BOTTOM + 18}" text-anchor="middle">{tick}</text>'
                   for tick in ticks)


def _grid_x(x: Scale, bottom: float, unit: str) -> str:
    return "".join(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="4" y2="{bottom:.1f}"/>'
                   f'<text class="small" x="{x(tick):.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{tick:g} {escape(unit)}</text>'
                   for tick in x.ticks())


def _axis_titles(height: int, across: str, up: str) -> str:
    return (f'<text class="small" x="{WIDTH / 2:.0f}" y="{height - 8}" text-anchor="middle">{escape(across)}</text>'
            f'<text class="small" x="{-(height - _BOTTOM + _TOP) / 2:.0f}" y="14" transform="rotate(-90)" text-anchor="middle">'
            f"{escape(up)}</text>")


def _label_width(labels: Sequence[str]) -> int:
    return min(300, 24 + 8 * max(len(label) for label in labels))


def _svg(height: int, label: str, parts: Sequence[str]) -> str:
    return (f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">'
            f'{"".join(parts)}</svg>')
