"""What the cases measure, how loaders take turns, and how it is shown."""

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from lightning_hpc.data import SharedMemoryLoader

T = TypeVar("T")

PEER, OWN = "DataLoader", "SharedMemoryLoader"
LOADERS: dict[str, Any] = {PEER: DataLoader, OWN: SharedMemoryLoader}
FORMAT = "lightning_hpc.loader_cases/1"


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        rounds: How often each loader has its turn.
        scale: Share of the usual number of batches.

    Raises:
        ValueError: If one of them is not above 0.
    """

    rounds: int = 5
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.scale > 0:
            raise ValueError(f"rounds={self.rounds!r} must be at least 1, and scale={self.scale!r} above 0")

    def of(self, usual: int, least: int = 1) -> int:
        """So many of what is usually so many."""
        return max(round(self.scale * usual), least)


@dataclass(frozen=True)
class Target:
    """What the issue asks for.

    Attributes:
        text: In its words.
        is_met: Whether it is met, by the median and its ratio to that of `DataLoader`.
    """

    text: str
    is_met: Callable[[float, float], bool]


@dataclass(frozen=True)
class Figure:
    """What one loader did in one setting.

    Attributes:
        case: Name of the case.
        setting: Number of workers and the like.
        loader: Name of the loader.
        measure: What was measured, with its unit.
        values: What was found: one a round where there are rounds.
        over_peer: Ratio of the medians to those of `DataLoader`, with the lowest and highest of a round; None for that
            loader itself, and where there is none.
        target: What is asked of it; empty if nothing is.
        holds: Whether it is met; None without a target.
    """

    case: str
    setting: str
    loader: str
    measure: str
    values: list[float]
    over_peer: tuple[float, float, float] | None = None
    target: str = ""
    holds: bool | None = None

    @classmethod
    def judged(
        cls,
        case: str,
        setting: str,
        loader: str,
        measure: str,
        values: list[float],
        target: Target,
        over_peer: tuple[float, float, float] | None = None,
    ) -> "Figure":
        """A figure that is held against a target."""
        holds = target.is_met(statistics.median(values), over_peer[0] if over_peer is not None else math.nan)
        return cls(case, setting, loader, measure, values, over_peer, target.text, holds)

    @property
    def median(self) -> float:
        """Of the values."""
        return statistics.median(self.values)


def take_turns(names: Sequence[str], size: Size, label: str, measure: Callable[[str], T]) -> dict[str, list[T]]:
    """Measures all in each round, in every second one backwards, and says how far it is.

    Args:
        names: What is compared.
        size: Has the number of rounds.
        label: For the progress that is shown.
        measure: Measures one of them once.
    """
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(size.rounds):
        for name in list(names)[:: -1 if number % 2 else 1]:
            show_progress(f"{label}, round {number + 1} of {size.rounds}: {name}")
            found[name].append(measure(name))
    return found


def count_workers(workers: int) -> str:
    """``"1 worker"``, ``"2 workers"``."""
    return f"{workers} worker{'s' * (workers != 1)}"


def show_progress(text: str) -> None:
    """Prints a line on the error stream, so that the table can go to a file."""
    print(f"  … {text}", file=sys.stderr, flush=True)


def compare(
    case: str, setting: str, measure: str, values: dict[str, list[float]], target: Target | None = None
) -> Iterator[Figure]:
    """Figures of all loaders in a setting.

    Args:
        case: Its name.
        setting: Number of workers and the like.
        measure: What was measured, with its unit.
        values: By loader, one a round; `PEER` is what the others are compared to.
        target: What is asked of loaders of ours.
    """
    for loader, own in values.items():
        over_peer = None if loader == PEER else ratios(own, values[PEER])
        if target is None or loader.startswith(PEER):
            yield Figure(case, setting, loader, measure, own, over_peer)
        else:
            yield Figure.judged(case, setting, loader, measure, own, target, over_peer)


def ratios(own: list[float], peer: list[float]) -> tuple[float, float, float] | None:
    """Of the medians, and the lowest and highest of a round; None where the peer has a 0."""
    if not all(peer):
        return None
    each = [one / other for one, other in zip(own, peer, strict=True)]
    return statistics.median(own) / statistics.median(peer), min(each), max(each)


def show(figure: Figure) -> None:
    """Prints a line of the table."""
    ratio = "" if figure.over_peer is None else "{:.2f} ({:.2f} to {:.2f})".format(*figure.over_peer)
    verdict = "" if figure.holds is None else f"{'PASS' if figure.holds else 'FAIL'}: {figure.target}"
    spread = f"({number(min(figure.values))} to {number(max(figure.values))})"
    print(
        f"{figure.case:<12}  {figure.setting:<9}  {figure.loader:<29}  {figure.measure:<28}"
        f"  {number(figure.median):>8}  {spread:<22}  {ratio:<22}  {verdict}".rstrip(),
        flush=True,
    )


def show_header() -> None:
    """Prints the first line of the table."""
    print(
        f"{'case':<12}  {'setting':<9}  {'loader':<29}  {'measure':<28}"
        f"  {'median':>8}  {'(lowest to highest)':<22}  {'over DataLoader':<22}  target"
    )


def number(value: float) -> str:
    """With three digits or more, and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def to_json(figures: list[Figure], settings: dict[str, Any]) -> str:
    """All figures with the settings that they were measured with."""
    found = [{**asdict(figure), "median": figure.median} for figure in figures]
    return json.dumps({"format": FORMAT, "settings": settings, "figures": found}, indent=2) + "\n"
