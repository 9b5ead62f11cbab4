"""Tells a step that took far longer than usual while the run goes on."""

from collections import deque

from lightning_hpc.trace.step_table import WARM_UP_STEPS

FACTOR = 3.0
"""An outlier takes more than this times the running median."""

LEAST_STEPS = 20
"""So many steps after the warm-up make the first median."""

_MOST_STEPS = 128
# Sorting takes some 10 µs, too much for each step.
_STEPS_A_MEDIAN = 16


class OutlierWatch:
    """Compares each step with the median of up to 128 steps before it, which is renewed every 16 steps.

    The first three steps, in which libraries are loaded and memory is allocated, do not count.
    """

    def __init__(self) -> None:
        self._durations: deque[int] = deque(maxlen=_MOST_STEPS)
        self._limit: float | None = None
        self._until_counted = WARM_UP_STEPS
        self._until_median = LEAST_STEPS

    def add(self, duration_ns: int) -> bool:
        """Whether the step is an outlier. False as long as there are too few to tell.

        Args:
            duration_ns: Nanoseconds of the step.
        """
        if self._until_counted:
            self._until_counted -= 1
            return False
        is_outlier = self._limit is not None and duration_ns > self._limit
        self._durations.append(duration_ns)
        self._until_median -= 1
        if not self._until_median:
            self._until_median = _STEPS_A_MEDIAN
            self._limit = FACTOR * sorted(self._durations)[len(self._durations) // 2]
        return is_outlier
