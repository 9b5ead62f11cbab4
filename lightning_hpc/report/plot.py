"""Charts that fit any width: shapes as SVG that is stretched, and text as HTML that is not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from lightning_hpc.report.axis import Axis

_SIZE = 1000  # of the stretched coordinates, both ways


@dataclass(frozen=True)
class Shape:
    """An element of a chart.

    Attributes:
        kind: Its class, which gives the colour: a phase, ``line``, ``band``, ``bar``, or ``rank0``, ….
        svg: The element's tag and geometry, in coordinates from 0 to 1000 to the right and down.
        tip: What to say where the pointer rests on it.
    """

    kind: str
    svg: str
    tip: str = ""

    def draw(self) -> str:
        """The element."""
        title = f"<title>{escape(self.tip)}</title>" if self.tip else ""
        tag = self.svg.split(" ", 1)[0]
        return f'<{self.svg} class="{escape(self.kind)}">{title}</{tag}>'


@dataclass(frozen=True)
class Plot:
    """A chart with its axes.

    Attributes:
        title: What is shown.
        unit: Of the vertical axis.
        x_unit: Of the horizontal axis.
        x: The horizontal axis.
        y: The vertical axis.
        shapes: What is drawn, the first at the bottom.
        summary: The chart in words, for those who do not see it.
    """

    title: str
    unit: str
    x_unit: str
    x: Axis
    y: Axis
    shapes: Sequence[Shape]
    summary: str

    def draw(self) -> str:
        """A figure of HTML."""
        rows = "".join(
            f'<line class="grid" x1="0" x2="{_SIZE}" y1="{_y(self.y, tick)}" y2="{_y(self.y, tick)}"/>'
            for tick in self.y.ticks
        )
        shapes = "".join(shape.draw() for shape in self.shapes)
        y_labels = "".join(f'<span style="top:{_y(self.y, tick) / 10:.1f}%">{tick:g}</span>' for tick in self.y.ticks)
        x_labels = "".join(f'<span style="left:{_x(self.x, tick) / 10:.1f}%">{tick:g}</span>' for tick in self.x.ticks)
        return (
            f'<figure><figcaption>{escape(self.title)} <span class="unit">{escape(self.unit)}</span></figcaption>'
            f'<div class="plot"><div class="y" aria-hidden="true">{y_labels}</div>'
            f'<svg viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none" role="img"'
            f' aria-label="{escape(f"{self.title}. {self.summary}")}">{rows}{shapes}</svg>'
            f'<div class="x" aria-hidden="true">{x_labels}</div>'
            f'<div class="x-unit" aria-hidden="true">{escape(self.x_unit)}</div></div></figure>\n'
        )


def polyline(x: Axis, y: Axis, xs: Sequence[float], ys: Sequence[float | None]) -> str:
    """A line with gaps where values are None."""
    path, is_down = [], False
    for place, value in zip(xs, ys, strict=True):
        if value is None:
            is_down = False
            continue
        path.append(f"{'L' if is_down else 'M'}{_x(x, place)} {_y(y, value)}")
        is_down = True
    if len(path) == 1:  # a single point is drawn as a short line
        path.append("h4")
    return f'path d="{"".join(path)}"'


def area(x: Axis, y: Axis, xs: Sequence[float], low: Sequence[float], high: Sequence[float]) -> str:
    """What lies between two lines."""
    if len(xs) == 1:  # all the width, since there is nothing beside it
        left, right = x.limits or (x.ticks[0], x.ticks[-1])
        xs, low, high = [left, right], [low[0]] * 2, [high[0]] * 2
    there = [f"{_x(x, place)} {_y(y, value)}" for place, value in zip(xs, high, strict=True)]
    back = [f"{_x(x, place)} {_y(y, value)}" for place, value in zip(xs, low, strict=True)]
    return f'path d="M{"L".join([*there, *reversed(back)])}Z"'


def bar(x: Axis, y: Axis, left: float, right: float, top: float) -> str:
    """A bar on the axis."""
    start, end, height = _x(x, left), _x(x, right), _y(y, top)
    return f'rect x="{start}" width="{max(end - start - 1.5, 0.5):.1f}" y="{height}" height="{_SIZE - height:.1f}"'


def stacked_bar(title: str, parts: Iterable[tuple[str, str, float]], total: float) -> str:
    """One horizontal bar of parts side by side.

    Args:
        title: Names the bar.
        parts: Class, name with figures, and value of each.
        total: The value that takes all the width.
    """
    cells = "".join(
        f'<span class="{escape(kind)}" style="width:{100 * value / total:.2f}%" title="{escape(tip)}"></span>'
        for kind, tip, value in parts
        if value > 0
    )
    return f'<div class="stack" role="img" aria-label="{escape(title)}">{cells}</div>'


def strip(title: str, shapes: Iterable[Shape]) -> str:
    """A low chart without axes, which others of the same scale stand below."""
    drawn = "".join(shape.draw() for shape in shapes)
    return (
        f'<svg class="strip" viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(title)}">{drawn}</svg>'
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names beside samples of their colour: class and name of each."""
    items = "".join(f'<li><i class="{escape(kind)}"></i>{escape(name)}</li>' for kind, name in entries)
    return f'<ul class="legend">{items}</ul>\n'


def _x(axis: Axis, value: float) -> float:
    return round(_SIZE * min(max(axis.share(value), 0.0), 1.0), 1)


def _y(axis: Axis, value: float) -> float:
    return round(_SIZE * (1 - min(max(axis.share(value), 0.0), 1.0)), 1)
