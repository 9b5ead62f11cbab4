"""Times the phases of iterations on a CUDA device, without ever waiting for it."""

from collections.abc import Callable
from itertools import pairwise

import torch

from lightning_hpc.trace.marked_timeline import charge_marks


class CudaMarks:
    """Events in the device's current stream, one where a phase begins, read when the device has passed them.

    The device comes to an event when all work before it is done, so the time between two events is what the device
    spent on the phase, or in it waiting for the host. Where the host runs ahead, its wait for a batch costs nothing,
    and shows as nothing. Events are used again, since making one takes longer than recording it.

    Args:
        device: The CUDA device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[tuple[int, torch.cuda.Event]] = []
        self._pool: list[torch.cuda.Event] = []
        self._error: RuntimeError | None = None

    def mark(self, phase: int) -> None:
        """Notes that a phase begins, or with `OUTSIDE` that none does."""
        # An event would become part of a graph that is being captured.
        if self._error is not None or torch.cuda.is_current_stream_capturing():
            return
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        try:
            event.record(torch.cuda.current_stream(self._device))
        except RuntimeError as error:  # a device that has failed, which is not for us to tell
            self._error = error
            return
        self._open.append((phase, event))

    def cut(self) -> "IterationMarks":
        """What was noted since the last call: the marks of an iteration, which ends with `OUTSIDE`."""
        marks, self._open = self._open, []
        return IterationMarks(marks, self._pool.extend, self._error)


class IterationMarks:
    """The marks of one iteration.

    Args:
        marks: Phases and the events at their start.
        give_back: Takes the events when they have been read.
        error: Why marks may be missing.
    """

    def __init__(
        self,
        marks: list[tuple[int, torch.cuda.Event]],
        give_back: Callable[[list[torch.cuda.Event]], None],
        error: RuntimeError | None = None,
    ) -> None:
        self._marks = marks
        self._give_back = give_back
        self._error = error

    def has_passed(self) -> bool:
        """Whether the device has come to the end of the iteration.

        Raises:
            RuntimeError: If the device has failed.
        """
        if self._error is not None:
            raise self._error
        return bool(self._marks[-1][1].query())

    def wait(self) -> None:
        """Waits for that.

        Raises:
            RuntimeError: If the device has failed.
        """
        if self._error is not None:
            raise self._error
        self._marks[-1][1].synchronize()

    def read(self) -> tuple[list[int], int]:
        """Nanoseconds by `Phase`, and in total. Only once, and when the device has passed."""
        events = [event for _, event in self._marks]
        # Events tell milliseconds as float32, exact to a nanosecond up to some ten of them; hence from mark to mark.
        times_ns = [0]
        for before, after in pairwise(events):
            times_ns.append(times_ns[-1] + max(round(before.elapsed_time(after) * 1e6), 0))
        self._give_back(events)
        return charge_marks([phase for phase, _ in self._marks], times_ns)
