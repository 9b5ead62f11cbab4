"""Phase accounting: a stack machine that charges each nanosecond of an iteration to one phase.

A phase that is pushed hides the one below it, so times are exclusive: an optimizer step that runs forward and backward
in its closure is charged for the rest only. The time of a fit is cut into iterations and spans::

    startup | loader_start | iteration | … | between_epochs | loader_start | iteration | … | shutdown

A span inside an iteration, such as validation, is taken out of it. A span may hold others, which only say what it did.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """What an iteration can be busy with. SCHEDULE is also the bottom of the stack: the loop's own time."""

    DATA_PREP = 0
    H2D = 1
    SCHEDULE = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5


# Plain integers: transitions happen some 25 times an iteration, and an enum member costs a look-up each time.
_DATA_PREP, _H2D, _SCHEDULE = int(Phase.DATA_PREP), int(Phase.H2D), int(Phase.SCHEDULE)


@dataclass(frozen=True)
class Span:
    """A stretch of time that belongs to no iteration.

    Attributes:
        name: ``startup`` (up to the first epoch's loop), ``loader_start`` (from the start of an epoch's loop to its
            first fetch), ``validation``, ``checkpoint`` and ``logging`` (while they are written), ``between_epochs``
            (from loop to loop, hooks at the epoch's end and start included), ``shutdown`` (from the end of the last
            loop), or ``unfinished_iteration`` (its batch was not trained to the end).
        epoch: Index of the epoch in which it began. None before the first.
        start_ns: Nanoseconds since the timeline began.
        duration_ns: Nanoseconds.
        parent: Name of the span that holds it. None where none does.
    """

    name: str
    epoch: int | None
    start_ns: int
    duration_ns: int
    parent: str | None = None


class Timeline:
    """Receives what happens in a training loop, and hands out the times of each iteration and span when it ends.

    An iteration starts with the first fetch after the last batch was finished, or with the batch itself where the
    training step does the fetching. It ends where the next one starts, or with the epoch. What `on_step` and `on_span`
    take is charged to the next iteration's schedule.

    Args:
        clock: Returns nanoseconds that never decrease, such as ``time.perf_counter_ns``.
        on_step: Called for an iteration whose batch was finished, with its nanoseconds by `Phase`, its start since the
            timeline began, and its nanoseconds in total.
        on_span: Called with each span when it ends.
        since_ns: When it begins, on ``clock``. None means now.

    Attributes:
        phase: The phase that is charged now; pushing the same again changes nothing.
        epoch: Index of the current or last epoch. None before the first.
    """

    def __init__(
        self,
        clock: Callable[[], int],
        on_step: Callable[[list[int], int, int], None],
        on_span: Callable[[Span], None],
        since_ns: int | None = None,
    ) -> None:
        self.phase = _SCHEDULE
        self.epoch: int | None = None
        self._in_epoch = False
        self._clock = clock
        self._on_step = on_step
        self._on_span = on_span
        self._below: list[int] = []
        self._charged = [0] * len(Phase)
        self._made_at = self._charged_until = clock() if since_ns is None else since_ns
        # The open iteration:
        self._started_at: int | None = None
        self._batch_finished = False
        self._outside_ns = 0
        # The open span, and the charges to return to at its end:
        self._span: tuple[str, int] | None = ("startup", self._made_at)
        self._charged_before_span = self._charged
        # Spans within the open one, innermost last: name, start, and the name of what holds it.
        self._inner_spans: list[tuple[str, int, str | None]] = []

    @property
    def elapsed_ns(self) -> int:
        """Nanoseconds since the timeline began."""
        return self._clock() - self._made_at

    def push(self, phase: int) -> None:
        """Enters ``phase``."""
        now = self._clock()  # as `_charge`: a call more would be felt here
        self._charged[self.phase] += now - self._charged_until
        self._charged_until = now
        self._below.append(self.phase)
        self.phase = phase

    def pop(self) -> None:
        """Returns to the phase before the last `push`."""
        now = self._clock()
        self._charged[self.phase] += now - self._charged_until
        self._charged_until = now
        # Empty after `finish_batch` has cleared what an exception had left behind.
        if self._below:
            self.phase = self._below.pop()

    def start_fetch(self) -> None:
        """The loop, or the training step, asks the loader for a batch."""
        if not self._below and self._in_epoch:
            if self._started_at is None or self._batch_finished:
                self._next_iteration()
            # A loader that looks ahead fetches twice in its first iteration; no transfer follows the first fetch.
            self.phase = _SCHEDULE
        self.push(_DATA_PREP)

    def stop_fetch(self) -> None:
        """The batch is there. What the loop does from here to `stop_transfer` is part of the transfer."""
        Timeline.pop(self)  # a subclass looks at the phase that results from both
        if not self._below and self._started_at is not None:
            self.phase = _H2D

    def start_transfer(self) -> None:
        """The batch is moved to the device."""
        self.push(_H2D)

    def stop_transfer(self) -> None:
        """The batch is on the device, or on its way."""
        Timeline.pop(self)  # as above
        if not self._below:
            self.phase = _SCHEDULE

    def start_batch(self) -> None:
        """Training on a batch starts. Opens an iteration where no fetch of the loop has done so."""
        if self._started_at is None or self._batch_finished:
            self._next_iteration()

    def finish_batch(self) -> None:
        """Training on the batch is finished; the loop's remaining work still belongs to the iteration."""
        self._charge()
        self._batch_finished = True
        # A phase that is still open here was left by an exception that the training step has caught.
        self._below.clear()
        self.phase = _SCHEDULE

    def enter_epoch(self, epoch: int) -> None:
        """The loop over the batches of an epoch starts."""
        self._close_span()
        self._below.clear()
        self.phase = _SCHEDULE
        self.epoch = epoch
        self._in_epoch = True
        self._open_span("loader_start")

    def exit_epoch(self) -> None:
        """The loop over the batches of an epoch has ended, also by an exception."""
        self._close_span()
        ended = self._end_iteration()
        self._in_epoch = False
        self._open_span("between_epochs")
        if ended is not None:
            self._on_step(*ended)

    def start_validation(self) -> None:
        """Validation begins. Ignored outside iterations, as in Lightning's sanity check, and when already begun."""
        if self._started_at is not None and self._span is None:
            self._charge()
            self._open_span("validation")

    def stop_validation(self) -> None:
        """Validation has ended."""
        if self._started_at is not None:
            self._close_span()

    def start_span(self, name: str) -> None:
        """Something begins that is worth a span of its own, wherever it happens."""
        if self._inner_spans:
            parent: str | None = self._inner_spans[-1][0]
        elif self._span is not None:
            parent = self._span[0]
        else:
            parent = None
            if self._started_at is not None:
                self._charge()
                self._open_span(name)
        self._inner_spans.append((name, self._clock(), parent))

    def stop_span(self) -> None:
        """What `start_span` announced last has ended, also by an exception."""
        name, start, parent = self._inner_spans.pop()
        if parent is None:
            self._close_span()
        elif self._span is not None:  # None after `close`
            self._on_span(Span(name, self.epoch, start - self._made_at, self._clock() - start, parent))

    def close(self) -> None:
        """The fit has ended, also by an exception. Nothing is handed out after this."""
        if self._in_epoch:
            self.exit_epoch()
        self._close_span("shutdown" if self.epoch is not None else "startup")

    def _charge(self) -> None:
        now = self._clock()
        self._charged[self.phase] += now - self._charged_until
        self._charged_until = now

    def _next_iteration(self) -> None:
        self._close_span()  # loader_start, or a validation that Lightning has skipped after announcing it
        ended = self._end_iteration()
        self.phase = _SCHEDULE
        self._charged = [0] * len(Phase)
        self._batch_finished = False
        self._outside_ns = 0
        self._started_at = self._clock()
        self._charged_until = self._clock()
        if ended is not None:
            self._on_step(*ended)

    def _end_iteration(self) -> tuple[list[int], int, int] | None:
        """Charges, start and total nanoseconds of the open iteration; None if there is none with a finished batch."""
        if self._started_at is None:
            return None
        start, self._started_at = self._started_at, None
        if not self._batch_finished:
            self._span = ("unfinished_iteration", start)
            self._close_span()
            return None
        self._charge()
        charged, self._charged = self._charged, [0] * len(Phase)
        # Read apart from the charges, so that their sum can be checked against it; what follows begins here.
        self._charged_until = self._clock()
        return charged, start - self._made_at, self._charged_until - start - self._outside_ns

    def _open_span(self, name: str) -> None:
        self._charged_before_span = self._charged.copy()
        self._span = (name, self._charged_until)

    def _close_span(self, name: str | None = None) -> None:
        if self._span is None:
            return
        opened_as, start = self._span
        self._span = None
        self._charge()
        duration = self._charged_until - start
        self._charged = self._charged_before_span
        self._outside_ns += duration
        self._on_span(Span(name or opened_as, self.epoch, start - self._made_at, duration))
