"""Chooses a codec by measured steps, in the order that the cost model proposes."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_SETTLE_STEPS = 2  # after a change: it still sends what the last codec had kept
_TRIAL_STEPS = 8
_FIRST_WINDOW, _LONGEST_WINDOW = 50, 1600
_MAX_TRIALS = 5
_WORTH_TRYING = 1.4  # times the best prediction: the model is no better than that on a busy machine
_TIE = 0.02  # of two that are this close, the one that loses less
_CHANGED = 0.2  # of the step's duration, after which all is tried again


@dataclass(frozen=True)
class Order:
    """What all ranks do next.

    Attributes:
        choice: ``"ddp"``, ``"none"``, or a codec's name.
        steps: For so many optimizer steps, after which the next order is given.
    """

    choice: str
    steps: int


@dataclass
class CodecPolicy:
    """Rank 0's decisions; the other ranks get its orders.

    It tries the choices that the model expects to be fast, some steps each, keeps the fastest, and looks from time to
    time whether that still takes what it took; if not, it tries again. Of two that are equally fast it keeps the one
    that loses less: they are given in that order.

    Args:
        choices: All that may be chosen, the most exact first.
        predictions: Predicted seconds a step of each.
    """

    choices: Sequence[str]
    predictions: Mapping[str, float]
    measured: dict[str, float] = field(default_factory=dict)
    _untried: list[str] = field(default_factory=list)
    _current: str = ""
    _window: int = _FIRST_WINDOW
    _kept: bool = False

    def __post_init__(self) -> None:
        self._start_trials()

    @property
    def is_settled(self) -> bool:
        """Whether a choice was made and not yet doubted."""
        return self._kept

    def start(self) -> Order:
        """The first order."""
        return self._try_next()

    def next(self, seconds: Sequence[float]) -> Order:
        """The order after the current one was carried out.

        Args:
            seconds: How long each of its steps took.
        """
        # Right after a change, a step is not like those that follow.
        typical = statistics.median(seconds[_SETTLE_STEPS:] if not self._kept and len(seconds) > 1 else seconds)
        if not self._kept:
            self.measured[self._current] = typical
            return self._try_next() if self._untried else self._keep_best()
        if abs(typical / self.measured[self._current] - 1) > _CHANGED:
            self._start_trials()
            return self._try_next()
        self._window = min(2 * self._window, _LONGEST_WINDOW)
        return Order(self._current, self._window)

    def reason(self) -> str:
        """What speaks for the current choice, in a line."""
        figures = [
            f"{choice} {self.measured[choice]:.3f} s (predicted {self.predictions[choice]:.3f})"
            for choice in sorted(self.measured, key=lambda choice: self.measured[choice])
        ]
        skipped = [f"{choice} {self.predictions[choice]:.3f}" for choice in self.choices if choice not in self.measured]
        rest = f"; predicted slower and not tried: {', '.join(skipped)}" if skipped else ""
        return f"{self._current} is the fastest or as fast as what loses more. A step takes: {', '.join(figures)}{rest}"

    def _start_trials(self) -> None:
        best = min(self.predictions[choice] for choice in self.choices)
        promising = [choice for choice in self.choices if self.predictions[choice] <= _WORTH_TRYING * best]
        promising.sort(key=lambda choice: self.predictions[choice])
        self._untried = promising[:_MAX_TRIALS]
        self.measured.clear()
        self._kept = False
        self._window = _FIRST_WINDOW

    def _try_next(self) -> Order:
        self._current = self._untried.pop(0)
        return Order(self._current, _SETTLE_STEPS + _TRIAL_STEPS)

    def _keep_best(self) -> Order:
        limit = (1 + _TIE) * min(self.measured.values())
        self._current = next(choice for choice in self.choices if self.measured.get(choice, limit + 1) <= limit)
        self._kept = True
        return Order(self._current, self._window)
