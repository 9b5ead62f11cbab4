"""A chart of horizontal bars as SVG."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_hpc.report import svg
from lightning_hpc.report.axis import Axis

_PLOT_WIDTH, _ROW, _BAR = 520, 30, 18
_TOP, _BOTTOM, _MARGIN = 60, 50, 16


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        name: What it stands for.
        value: Its length, not negative.
        spread: Smallest and largest value seen, with the value between them, or None.
        remark: What to say behind it, besides its value.
    """

    name: str
    value: float
    spread: tuple[float, float] | None = None
    remark: str = ""


@dataclass(frozen=True)
class BarChart:
    """Bars, one below the other, with the spread of each as a line over its end.

    Attributes:
        title: What is shown.
        x_label: What the values are, with their unit.
        bars: From top to bottom.
        reference: A value to compare with, as a dashed line, or None.
        note: A line below the chart.
    """

    title: str
    x_label: str
    bars: Sequence[Bar]
    reference: float | None = 1.0
    note: str = ""

    def draw(self) -> str:
        """The chart as an SVG file."""
        longest = max((len(_remark(bar)) for bar in self.bars), default=0)
        right = self._left + _PLOT_WIDTH + longest * svg.LETTER
        width = max(right, len(self.note) * svg.LETTER, len(self.title) * svg.LETTER * 1.4) + 2 * _MARGIN
        height = self._base + _BOTTOM + (20 if self.note else 0)
        return svg.document(width, height, self.title, self._elements(height))

    @property
    def _left(self) -> float:
        return _MARGIN + 8 + max((len(bar.name) for bar in self.bars), default=0) * svg.LETTER

    @property
    def _base(self) -> float:
        return _TOP + _ROW * len(self.bars)

    def _elements(self, height: float) -> Iterator[str]:
        ends = [bar.spread[1] if bar.spread else bar.value for bar in self.bars]
        axis = Axis.linear([*ends, self.reference or 0.0])
        yield svg.text(_MARGIN, 24, self.title, "title")
        yield svg.text(_MARGIN, 44, self.x_label, "note")
        for tick in axis.ticks:
            x = self._x(axis, tick)
            yield svg.line(x, _TOP, x, self._base, "grid")
            yield svg.text(x, self._base + 18, f"{tick:g}", "note middle")
        for index, bar in enumerate(self.bars):
            yield from self._bar(axis, index, bar)
        yield svg.line(self._left, _TOP, self._left, self._base, "axis")
        if self.reference is not None:
            x = self._x(axis, self.reference)
            yield svg.line(x, _TOP, x, self._base, "reference")
        if self.note:
            yield svg.text(_MARGIN, height - 14, self.note, "note")

    def _bar(self, axis: Axis, index: int, bar: Bar) -> Iterator[str]:
        y = _TOP + _ROW * index + (_ROW - _BAR) / 2
        end = self._x(axis, bar.value)
        middle = y + _BAR / 2
        kind = f"series{index % svg.SERIES_COLOURS}"
        size = f'width="{end - self._left:.1f}" height="{_BAR}"'
        shape = f'<rect class="{kind}" x="{self._left:.1f}" y="{y:.1f}" {size}/>'
        low, high = bar.spread or (bar.value, bar.value)
        spread = f", {low:.2f} to {high:.2f}" if bar.spread else ""
        yield svg.tooltip(f"{bar.name}: {bar.value:.2f}{spread}", shape)
        yield svg.text(self._left - 8, middle + 4, bar.name, "end")
        if bar.spread:
            yield from self._whisker(self._x(axis, low), self._x(axis, high), middle)
        yield svg.text(max(end, self._x(axis, high)) + 8, middle + 4, _remark(bar), "note")

    def _whisker(self, low: float, high: float, y: float) -> Iterator[str]:
        yield svg.line(low, y, high, y, "whisker")
        for x in (low, high):
            yield svg.line(x, y - 4, x, y + 4, "whisker")

    def _x(self, axis: Axis, value: float) -> float:
        return self._left + _PLOT_WIDTH * axis.share(value)


def _remark(bar: Bar) -> str:
    return f"{bar.value:.2f}{f' {bar.remark}' if bar.remark else ''}"
