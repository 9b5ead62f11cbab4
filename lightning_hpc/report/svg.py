"""What the charts share: escaped elements, and colours for readers' light and dark schemes."""

from collections.abc import Iterable
from html import escape

LETTER = 7
"""Mean width of a character of the charts' text, in pixels."""

SERIES_COLOURS = 10
"""So many series have a colour of their own; the classes are ``series0``, ``series1``, …."""

# The same order of hues for both grounds; each contrasts with its ground at 4.5 to 1 or more.
_LIGHT = (
    "#1f5fb4", "#b93a0b", "#12703a", "#8a2be2", "#0b6a80", "#8f5a00", "#b8165f", "#466b0c", "#475569", "#7f1d1d",
)  # fmt: skip
_DARK = (
    "#7db2ea", "#ffb077", "#7ee2a0", "#d0a5ff", "#67d5e6", "#f5c462", "#ff8fc0", "#bbe06a", "#b6c2d0", "#ff9d9d",
)  # fmt: skip


def document(width: float, height: float, title: str, elements: Iterable[str]) -> str:
    """A complete SVG file, which may also stand within a page of HTML."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">',
        f"<style>{_style()}</style>",
        f'<rect class="ground" width="{width:.0f}" height="{height:.0f}"/>',
        *elements,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(x: float, y: float, content: str, kind: str) -> str:
    """A line of text; ``kind`` names its classes: ``title``, ``note``, ``middle``, ``end``, ``series0``, …."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line of class ``grid``, ``axis``, ``reference`` or ``series0``, …."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def tooltip(content: str, *elements: str) -> str:
    """Elements that show a text where the pointer rests on them."""
    return f"<g><title>{escape(content)}</title>{''.join(elements)}</g>"


def _style() -> str:
    common = (
        "text{font:12px system-ui,sans-serif;stroke:none}.title{font-size:16px;font-weight:600}"
        ".middle{text-anchor:middle}.end{text-anchor:end}polyline{fill:none}polyline,line{stroke-width:2}"
        ".grid,.axis{stroke-width:1}.reference{stroke-dasharray:5 4;stroke-width:1.5}"
    )
    light = _scheme(_LIGHT, ground="#ffffff", ink="#1b1f24", faint="#59636e", grid="#e3e7eb")
    dark = _scheme(_DARK, ground="#0d1117", ink="#e6edf3", faint="#9aa5b1", grid="#252d36")
    return f"{common}{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _scheme(series: tuple[str, ...], *, ground: str, ink: str, faint: str, grid: str) -> str:
    rules = [
        f".ground{{fill:{ground}}}text{{fill:{ink}}}.note{{fill:{faint}}}.grid{{stroke:{grid}}}"
        f".axis,.whisker{{stroke:{ink}}}.reference{{stroke:{faint}}}"
    ]
    for index, colour in enumerate(series):
        rules.append(f".series{index}{{stroke:{colour}}}")
        rules.append(f"circle.series{index},rect.series{index},text.series{index}{{fill:{colour};stroke:none}}")
    return "".join(rules)
