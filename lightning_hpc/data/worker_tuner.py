"""When a training that runs gets one worker more, or one fewer."""

from dataclasses import dataclass
from statistics import median

_PARTS = 7
"""Parts of a window. Its figures are medians over them, so that a validation or a checkpoint does not matter."""

_MIN_BATCHES = 8  # of a part; else twice what is made ahead, since workers that keep step deliver in bursts

_HUNGRY = 0.05
"""Share of the time for which the training waits; above, a further worker is tried."""

_FED = 0.01
"""Share below which one fewer is tried. One fewer suffices up to three times that: far enough from `_HUNGRY`."""

_WORTH = 0.03
"""What a worker has to bring: further batches a second, as a share. It is less than what is waited for."""

_OTHER_LOAD = 0.25
"""Difference of the time from batch to batch, as a share, that makes it worth while to try again what has failed."""

_BACK_OFF = 4

_MORE, _FEWER = 1, -1


@dataclass(frozen=True)
class Change:
    """A decision.

    Attributes:
        num_workers: How many there shall be.
        reason: Why, in words.
    """

    num_workers: int
    reason: str


class WorkerTuner:
    """Finds the number of workers while they are used, from what can be seen of a training: how long it waits.

    Each change is a trial for a window of batches, which is undone if it does not hold what it was made for: a further
    worker has to bring more batches a second, one fewer has to suffice. A trial that fails makes the time until the
    next one in that direction several times as long, and so does a change that is taken back later. So the number of
    changes grows with the logarithm of the number of batches only; what has failed is tried earlier if the load has
    clearly changed.

    Args:
        num_workers: How many there are, at least 1.
        most: How many there may be.
        prefetch_factor: Batches that each makes ahead.
    """

    def __init__(self, num_workers: int, most: int, prefetch_factor: int = 2) -> None:
        assert num_workers >= 1
        self._num_workers, self._most, self._prefetch_factor = num_workers, most, prefetch_factor
        self._patience = {_MORE: 1, _FEWER: 1}  # windows that pass between a failure and the next trial
        self._rest = {_MORE: 0, _FEWER: 1}  # windows that have to pass yet
        self._failed: dict[int, _Window] = {}  # the load with which it did, by direction
        self._trial: tuple[int, _Window] | None = None  # its direction, and what it is compared to
        self._last_kept = 0
        self._restart()

    @property
    def num_workers(self) -> int:
        """How many there shall be."""
        return self._num_workers

    def skip(self) -> None:
        """Leaves out the next batches: at the beginning of an epoch, when some are ready or none."""
        self._skipped = 0

    def forbid_more(self) -> None:
        """Heeds that the last change could not be made, since no further worker can be started."""
        self._num_workers -= 1
        self._most = self._num_workers
        self._trial = None
        self._restart()

    def observe(self, wait_s: float, step_s: float) -> Change | None:
        """Heeds a batch, of which all workers were there to make it.

        Args:
            wait_s: For how long it was waited for.
            step_s: From when the batch before was handed out until this one was asked for.

        Returns:
            What shall be changed, if anything. It counts as changed from now on.
        """
        if self._skipped < self._part_batches:
            self._skipped += 1
            return None
        self._batches += 1
        self._waited_s += wait_s
        self._took_s += wait_s + step_s
        return None if self._batches < self._part_batches else self._end_part()

    def _restart(self) -> None:
        """Begins anew, behind what was made with another number of workers."""
        self._part_batches = max(_MIN_BATCHES, 2 * self._prefetch_factor * self._num_workers)
        self._window = _Window([], [])
        self._skipped = self._batches = 0
        self._waited_s = self._took_s = 0.0

    def _end_part(self) -> Change | None:
        took_s = max(self._took_s, 1e-9)
        self._window.add(took_s / self._batches, self._waited_s / took_s)
        self._batches, self._waited_s, self._took_s = 0, 0.0, 0.0
        change = self._judge(self._window)
        if change is not None:
            self._num_workers = change.num_workers
            self._restart()
        elif self._window.is_full:
            self._window = _Window([], [])
        return change

    def _judge(self, window: "_Window") -> Change | None:
        if self._trial is not None:
            direction, before = self._trial
            if direction == _FEWER and window.is_surely_above(3 * _FED):
                return self._undo(direction, before, f"with {self._num_workers} it waits {window.wait:.0%} of the time")
            if not window.is_full:
                return None
            if direction == _MORE and not window.beats(before):
                gain = max(window.gain_over(before), 0)
                noise = "" if gain < _WORTH else ", which may be chance"
                return self._undo(direction, before, f"another one brought {gain:.0%} more batches a second{noise}")
            self._keep(direction)
        return self._consider(window) if window.is_full else None

    def _undo(self, direction: int, before: "_Window", reason: str) -> Change:
        self._trial = None
        self._failed[direction] = before
        self._patience[direction] *= _BACK_OFF
        self._rest[direction] = self._patience[direction]
        return Change(self._num_workers - direction, reason)

    def _keep(self, direction: int) -> None:
        self._trial = None
        self._failed.clear()
        if self._last_kept == -direction:
            self._patience[-direction] *= _BACK_OFF
        self._last_kept = direction
        self._rest = {direction: 0, -direction: self._patience[-direction]}

    def _consider(self, window: "_Window") -> Change | None:
        for direction, is_wanted, reason in (
            (_MORE, window.wait > _HUNGRY and self._num_workers < self._most, f"waits {window.wait:.0%} of the time"),
            (_FEWER, window.wait < _FED and self._num_workers > 1, "does not wait, and one fewer may suffice"),
        ):
            if is_wanted and (not self._rest[direction] or self._has_changed(direction, window)):
                self._trial = direction, window
                return Change(self._num_workers + direction, f"the training {reason}")
        self._rest = {direction: max(rest - 1, 0) for direction, rest in self._rest.items()}
        return None

    def _has_changed(self, direction: int, window: "_Window") -> bool:
        failed = self._failed.get(direction)
        return failed is not None and window.differs_from(failed)


@dataclass(frozen=True)
class _Window:
    """What was seen of some parts: seconds from batch to batch, and the share of the time that was waited."""

    cycles_s: list[float]
    waits: list[float]

    def add(self, cycle_s: float, wait: float) -> None:
        self.cycles_s.append(cycle_s)
        self.waits.append(wait)

    @property
    def is_full(self) -> bool:
        return len(self.waits) == _PARTS

    @property
    def wait(self) -> float:
        return median(self.waits)

    def is_surely_above(self, wait: float) -> bool:
        """Whether most parts have waited longer, where there are enough of them to tell."""
        return len(self.waits) > 1 and sorted(self.waits)[(len(self.waits) - 1) // 2] > wait

    def gain_over(self, before: "_Window") -> float:
        """How many more batches a second these are, as a share."""
        return median(before.cycles_s) / median(self.cycles_s) - 1

    def beats(self, before: "_Window") -> bool:
        """Whether that is worth a worker, and more than what the parts differ by anyway."""
        return self.gain_over(before) >= _WORTH and median(self.cycles_s) < min(before.cycles_s)

    def differs_from(self, before: "_Window") -> bool:
        """Whether the load is clearly another one."""
        is_noise = min(before.cycles_s) <= median(self.cycles_s) <= max(before.cycles_s)
        return not is_noise and abs(self.gain_over(before)) > _OTHER_LOAD
