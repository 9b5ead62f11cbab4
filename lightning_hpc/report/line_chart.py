"""A chart of lines as SVG."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lightning_hpc.report import svg
from lightning_hpc.report.axis import Axis

_PLOT_WIDTH, _PLOT_HEIGHT = 560, 360
_LEFT, _TOP, _BOTTOM, _MARGIN = 70, 56, 56, 16
_LABEL_GAP = 15
_DASHES = ("", "7 3", "2 3", "9 3 2 3")


@dataclass(frozen=True)
class LineChart:
    """Lines over a few named places, such as numbers of nodes, with a name at the end of each line.

    Attributes:
        title: What is shown.
        x_label: What the places are.
        y_label: What the values are, with their unit.
        places: Names along the horizontal axis, at equal distances.
        series: One value a place for each line, or None where there is none.
        references: Lines to compare with, which are dashed and grey.
        is_log: Whether equal distances along the vertical axis are equal ratios; all values must be positive then.
        note: A line below the chart.
    """

    title: str
    x_label: str
    y_label: str
    places: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    references: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    is_log: bool = True
    note: str = ""

    def draw(self) -> str:
        """The chart as an SVG file."""
        names = [*self.series, *self.references]
        right = _LEFT + _PLOT_WIDTH + 14 + max((len(name) for name in names), default=0) * svg.LETTER
        width = max(right, len(self.note) * svg.LETTER, len(self.title) * svg.LETTER * 1.4) + 2 * _MARGIN
        height = _TOP + _PLOT_HEIGHT + _BOTTOM + (20 if self.note else 0)
        return svg.document(width, height, self.title, self._elements(height))

    def _elements(self, height: float) -> Iterator[str]:
        values = [value for line in (*self.series.values(), *self.references.values()) for value in line]
        present = [value for value in values if value is not None]
        axis = Axis.logarithmic(present) if self.is_log else Axis.linear(present)
        yield svg.text(_MARGIN, 24, self.title, "title")
        yield svg.text(_MARGIN, 44, self.y_label, "note")
        yield from self._grid(axis)
        ends: list[tuple[float, str, str]] = []
        for name, line in self.references.items():
            points = list(self._points(line, axis))
            yield from _path(points, "reference", "")
            ends += [(points[-1][1], name, "note")] if points else []
        for index, (name, line) in enumerate(self.series.items()):
            kind = f"series{index % svg.SERIES_COLOURS}"
            points = list(self._points(line, axis))
            yield from _path(points, kind, _DASHES[index % len(_DASHES)])
            yield from self._marks(name, line, points, kind)
            ends += [(points[-1][1], name, kind)] if points else []
        yield from _labels(ends)
        if self.note:
            yield svg.text(_MARGIN, height - 14, self.note, "note")

    def _grid(self, axis: Axis) -> Iterator[str]:
        for tick in axis.ticks:
            y = _y(axis.share(tick))
            yield svg.line(_LEFT, y, _LEFT + _PLOT_WIDTH, y, "grid")
            yield svg.text(_LEFT - 8, y + 4, f"{tick:g}", "note end")
        base = _TOP + _PLOT_HEIGHT
        yield svg.line(_LEFT, base, _LEFT + _PLOT_WIDTH, base, "axis")
        for index, place in enumerate(self.places):
            yield svg.text(self._x(index), base + 18, place, "middle")
        yield svg.text(_LEFT + _PLOT_WIDTH / 2, base + 38, self.x_label, "note middle")

    def _points(self, line: Sequence[float | None], axis: Axis) -> Iterator[tuple[float, float]]:
        for index, value in enumerate(line):
            if value is not None:
                yield self._x(index), _y(axis.share(value))

    def _marks(
        self, name: str, line: Sequence[float | None], points: Sequence[tuple[float, float]], kind: str
    ) -> Iterator[str]:
        present = [(place, value) for place, value in zip(self.places, line, strict=True) if value is not None]
        for (place, value), (x, y) in zip(present, points, strict=True):
            yield svg.tooltip(
                f"{name}, {self.x_label} {place}: {value:.3g}",
                f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
            )

    def _x(self, index: int) -> float:
        inset = 20
        steps = max(len(self.places) - 1, 1)
        return _LEFT + inset + (_PLOT_WIDTH - 2 * inset) * index / steps


def _y(share: float) -> float:
    return _TOP + _PLOT_HEIGHT * (1 - share)


def _path(points: Sequence[tuple[float, float]], kind: str, dash: str) -> Iterator[str]:
    if len(points) > 1:
        dashes = f' style="stroke-dasharray:{dash}"' if dash else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline class="{kind}"{dashes} points="{path}"/>'


def _labels(ends: Sequence[tuple[float, str, str]]) -> Iterator[str]:
    """Names beside the ends of their lines, moved apart where they would overlap."""
    ordered = sorted(ends)
    places = [y for y, _, _ in ordered]
    for index, (above, _) in enumerate(pairwise(range(len(places)))):
        places[index + 1] = max(places[index + 1], places[above] + _LABEL_GAP)
    limit = float(_TOP + _PLOT_HEIGHT + _LABEL_GAP)
    for index in reversed(range(len(places))):
        places[index] = min(places[index], limit)
        limit = places[index] - _LABEL_GAP
    for place, (_, name, kind) in zip(places, ordered, strict=True):
        yield svg.text(_LEFT + _PLOT_WIDTH + 8, place + 4, name, kind)
