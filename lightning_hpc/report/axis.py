"""A chart's axis: where its ticks are, and where a value lies."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A scale that ends at ticks.

    Attributes:
        ticks: Values of the ticks, ascending; two at least, where there are no limits.
        is_log: Whether equal distances are equal ratios.
        limits: Where the scale begins and ends instead, without a logarithm.
    """

    ticks: tuple[float, ...]
    is_log: bool = False
    limits: tuple[float, float] | None = None

    @classmethod
    def linear(cls, values: Iterable[float], most: int = 6) -> "Axis":
        """From zero to beyond the largest value, which must not be negative."""
        top = max(values, default=0.0) or 1.0
        step = next(step for step in _steps(top / most) if step * most >= top)
        return cls(tuple(step * index for index in range(math.ceil(top / step - 1e-9) + 1)))

    @classmethod
    def between(cls, low: float, high: float, most: int = 5) -> "Axis":
        """From one value to another, with ticks between them; widened where both are the same."""
        if not high > low:
            high = low + max(abs(low) * 0.1, 1.0)
        steps = cls.linear([high - low], most).ticks
        step = steps[1] - steps[0]
        first = math.ceil(low / step - 1e-9)
        ticks = tuple(round(step * index, 9) for index in range(first, math.floor(high / step + 1e-9) + 1))
        return cls(ticks, limits=(low, high))

    @classmethod
    def logarithmic(cls, values: Iterable[float]) -> "Axis":
        """From below the smallest to beyond the largest value, all of them positive, at 1, 2, 5, 10, …."""
        given = list(values) or [1.0]
        low, high = min(given), max(given)
        assert low > 0, "a logarithm of what is not positive"
        marks = [mark * 10.0**power for power in range(_power(low) - 1, _power(high) + 2) for mark in (1, 2, 5)]
        first = max(index for index, mark in enumerate(marks) if mark <= low * (1 + 1e-9))
        last = min(index for index, mark in enumerate(marks) if mark >= high * (1 - 1e-9))
        return cls(tuple(marks[first : max(last, first + 1) + 1]), is_log=True)

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the start of the scale, 1 at its end."""
        low, high = self.limits or (self.ticks[0], self.ticks[-1])
        if self.is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)


def _steps(least: float) -> Iterable[float]:
    """1, 2, 5, 10, … times the power of ten below ``least``."""
    power = 10.0 ** _power(least)
    return [mark * power for mark in (1, 2, 5, 10)]


def _power(value: float) -> int:
    return math.floor(math.log10(value))
