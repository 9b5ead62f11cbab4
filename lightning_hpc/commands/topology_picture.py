"""A probe's result as a picture: the domains as bars over a heat map of the bandwidth between ranks.

The columns of the map are ranks in the order of the domains, so that each bar covers its ranks' columns, and what is
near forms blocks along the diagonal. The picture needs no other file and follows the reader's light or dark scheme.
"""

import math
from collections.abc import Iterator
from html import escape
from textwrap import wrap
from typing import Any

from lightning_hpc.comm.grouping import flatten
from lightning_hpc.comm.groups import level_name
from lightning_hpc.comm.link_speed import format_bytes_per_second, format_seconds, three_digits
from lightning_hpc.comm.probe_result import ProbeResult
from lightning_hpc.comm.topology_view import domain_name

_CELL = 54
_BAR = 40
_GAP = 3
_LEFT = 150
_LINE = 20
_MARGIN = 16
_MIN_WIDTH = 640
_LETTER = 7  # mean width of a character
_STEPS = 6
_MIN_SPAN = 100.0  # the scale's ends are at least so far apart, or it would paint noise in strong colours

# One hue from pale to strong on light ground, from dim to bright on dark ground; digits contrast with each at 4.5 to 1.
_LIGHT = ("#eaf2fb", "#cfe1f5", "#a6c8ec", "#6fa5dc", "#2f6fb3", "#123f73")
_DARK = ("#152536", "#1b3550", "#234a72", "#2f6296", "#7db2ea", "#c7e0fa")
_LIGHT_DIGITS = ("#1b1f24",) * 4 + ("#ffffff",) * 2
_DARK_DIGITS = ("#e6edf3",) * 4 + ("#0d1117",) * 2


def draw_html(result: ProbeResult) -> str:
    """The picture in a page."""
    title = escape(_title(result))
    page = "body{margin:0;background:#fff}@media (prefers-color-scheme:dark){body{background:#0d1117}}"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{page}</style>\n</head>\n<body>\n{draw_svg(result)}</body>\n</html>\n"
    )


def draw_svg(result: ProbeResult) -> str:
    """The picture as SVG."""
    return "\n".join(_Picture(result).lines()) + "\n"


class _Picture:
    def __init__(self, result: ProbeResult) -> None:
        self._result = result
        self._order = result.topology.ranks
        self._column = {rank: index for index, rank in enumerate(self._order)}
        self._seen: dict[int, int] = {}
        self._has_map = any(value is not None for row in result.bytes_per_second for value in row)
        self._width = max(_MIN_WIDTH, _LEFT + _CELL * len(self._order) + 2 * _MARGIN)
        letters = int((self._width - 2 * _MARGIN) / _LETTER)
        self._notes = [(line, "note") for text in _levels(result) for line in wrap(text, letters)]
        self._notes += [
            (line, "warning") for text in result.warnings for line in wrap(f"Warning: {text}", int(letters * 0.9))
        ]
        self._top = _MARGIN + 2 * _LINE
        self._map_top = self._top + (result.topology.depth + 1) * (_BAR + _GAP) + _LINE
        self._notes_top = self._map_top + (_CELL * len(self._order) + 2 * _LINE if self._has_map else 0)

    def lines(self) -> Iterator[str]:
        height = self._notes_top + _LINE * len(self._notes) + _MARGIN
        size = f'viewBox="0 0 {self._width:.0f} {height:.0f}" width="{self._width:.0f}" height="{height:.0f}"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(_title(self._result))}">'
        yield f"<style>{_style()}</style>"
        yield f'<rect class="ground" width="{self._width:.0f}" height="{height:.0f}"/>'
        yield _text(_MARGIN, _MARGIN + 14, _title(self._result), "title")
        yield from self._bars(self._result.topology.domains, self._result.topology.depth)
        if self._has_map:
            yield from self._map()
        for index, (note, kind) in enumerate(self._notes):
            yield _text(_MARGIN, self._notes_top + _LINE * index, note, kind)
        yield "</svg>"

    def _bars(self, domain: Any, height: int) -> Iterator[str]:
        """A domain's bar and, below it, those of what it holds; ``height`` is that above ranks."""
        ranks = flatten(domain)
        first = self._column[ranks[0]]
        row = self._result.topology.depth - height
        x, y = _MARGIN + _LEFT + _CELL * first, self._top + row * (_BAR + _GAP)
        width = _CELL * len(ranks) - _GAP
        names = list(filter(None, [self._name(domain, height), self._inside(height, ranks)]))
        yield f"<g><title>{escape(': '.join(names))}</title>"
        yield f'<rect class="bar{min(height, 2)}" x="{x}" y="{y}" width="{width}" height="{_BAR}" rx="4"/>'
        for index, name in enumerate(names):
            down = _BAR / 2 + 4 + (15 * index - 7.5 * (len(names) - 1))
            yield _text(x + width / 2, y + down, _fitted(name, width), "middle")
        yield "</g>"
        if height:
            for child in domain:
                yield from self._bars(child, height - 1)

    def _name(self, domain: Any, height: int) -> str:
        if height == 0:
            return str(domain)
        if height == self._result.topology.depth:
            return "all ranks"
        number = self._seen.get(height, 0)
        self._seen[height] = number + 1
        hosts = dict.fromkeys(self._result.host_names[rank] for rank in flatten(domain)) if self._result.ranks else {}
        place = f" ({next(iter(hosts))})" if len(hosts) == 1 else ""
        return f"{domain_name(height - 1)} {number}{place}"

    def _inside(self, height: int, ranks: tuple[int, ...]) -> str:
        """The speed between what a domain holds."""
        if height == 0 or not self._result.links or len(ranks) < 2:
            return ""
        return format_bytes_per_second(self._result.links[height - 1].bytes_per_second)

    def _map(self) -> Iterator[str]:
        values = [value for row in self._result.bytes_per_second for value in row if value is not None]
        high = math.log(max(values))
        low = min(math.log(min(values)), high - math.log(_MIN_SPAN))
        yield _text(
            _MARGIN, self._map_top - 8, "MB/s from the row's rank to the column's; dotted: not measured", "note"
        )
        for sender in self._order:
            y = self._map_top + _CELL * self._column[sender]
            name = f"rank {sender}" + (f" ({self._result.ranks[sender].host})" if self._result.ranks else "")
            yield _text(_MARGIN, y + _CELL / 2 + 4, _fitted(name, _LEFT), "note")
            for receiver in self._order:
                value = self._result.bytes_per_second[sender][receiver]
                yield from self._cell(sender, receiver, y, value, low, high)

    def _cell(
        self, sender: int, receiver: int, y: float, value: float | None, low: float, high: float
    ) -> Iterator[str]:
        x = _MARGIN + _LEFT + _CELL * self._column[receiver]
        side = _CELL - _GAP
        if value is None:
            if sender != receiver:
                yield f'<rect class="empty" x="{x}" y="{y}" width="{side}" height="{side}" rx="3"/>'
            return
        step = min(int((math.log(value) - low) / (high - low) * _STEPS), _STEPS - 1)
        latency = self._result.latency_seconds[sender][receiver]
        after = f", {format_seconds(latency)}" if latency else ""
        yield f"<g><title>rank {sender} to rank {receiver}: {format_bytes_per_second(value)}{after}</title>"
        yield f'<rect class="heat{step}" x="{x}" y="{y}" width="{side}" height="{side}" rx="3"/>'
        yield _text(
            x + side / 2,
            y + side / 2 + 4,
            three_digits(value / 1e6),
            f"digits{step} middle",
        )
        yield "</g>"


def _title(result: ProbeResult) -> str:
    size, nodes = result.topology.world_size, len(result.topology.nodes)
    return f"{size} rank{'s' * (size > 1)} in {f'{nodes} nodes' if nodes > 1 else 'one domain'}"


def _levels(result: ProbeResult) -> Iterator[str]:
    for height, link in enumerate(result.links):
        yield f"{level_name(height)}: {link} (payload of one transfer at a time, one way)"


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _fitted(text: str, width: float) -> str:
    """As much of a text as fits: without what is in brackets, or cut. Its element has all of it as a tooltip."""
    room = int((width - 4) / _LETTER)
    if len(text) > room:
        text = text.partition(" (")[0]
    return text if len(text) <= room else text[: max(room - 1, 1)] + "…"


def _style() -> str:
    common = (
        "text{font:12px system-ui,sans-serif}.title{font-size:16px;font-weight:600}.middle{text-anchor:middle}"
        ".warning{font-weight:600}.empty{fill:none;stroke-dasharray:2 4}"
    )
    light = _scheme(
        _LIGHT,
        _LIGHT_DIGITS,
        ground="#ffffff",
        ink="#1b1f24",
        line="#b8c0c8",
        alarm="#9a3412",
        bars=("#e7ebef", "#d3dae1", "#bfc9d2"),
    )
    dark = _scheme(
        _DARK,
        _DARK_DIGITS,
        ground="#0d1117",
        ink="#e6edf3",
        line="#4a535d",
        alarm="#ffb077",
        bars=("#1d242c", "#2a333d", "#38434f"),
    )
    return f"{common}{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _scheme(
    heat: tuple[str, ...],
    digits: tuple[str, ...],
    *,
    ground: str,
    ink: str,
    line: str,
    alarm: str,
    bars: tuple[str, ...],
) -> str:
    rules = [f".ground{{fill:{ground}}}text{{fill:{ink}}}.empty{{stroke:{line}}}.warning{{fill:{alarm}}}"]
    rules += [f".bar{height}{{fill:{colour}}}" for height, colour in enumerate(bars)]
    rules += [f".heat{step}{{fill:{colour}}}" for step, colour in enumerate(heat)]
    rules += [f".digits{step}{{fill:{colour}}}" for step, colour in enumerate(digits)]
    return "".join(rules)
