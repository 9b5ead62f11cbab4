"""A timeline that announces each change of phase, for a device that is timed by marks in its own queue of work."""

from collections.abc import Callable

from typing_extensions import override

from lightning_hpc.trace.timeline import Phase, Span, Timeline

OUTSIDE = -1
"""No phase: between iterations, and in spans."""


class MarkedTimeline(Timeline):
    """Calls ``mark`` with the phase that begins, or with `OUTSIDE`, whenever another one is charged from then on.

    All marks of an iteration are made before it is handed out, the last one being `OUTSIDE`.

    Args:
        clock: As for `Timeline`.
        on_step: As for `Timeline`.
        on_span: As for `Timeline`.
        since_ns: As for `Timeline`.
        mark: Is called within the iteration, so it should be quick.
    """

    def __init__(
        self,
        clock: Callable[[], int],
        on_step: Callable[[list[int], int, int], None],
        on_span: Callable[[Span], None],
        since_ns: int | None,
        mark: Callable[[int], None],
    ) -> None:
        super().__init__(clock, on_step, on_span, since_ns)
        self._mark = mark
        self._marked = OUTSIDE

    @override
    def push(self, phase: int) -> None:
        super().push(phase)
        self._follow()

    @override
    def pop(self) -> None:
        super().pop()
        self._follow()

    @override
    def stop_fetch(self) -> None:
        super().stop_fetch()
        self._follow()

    @override
    def stop_transfer(self) -> None:
        super().stop_transfer()
        self._follow()

    @override
    def finish_batch(self) -> None:
        super().finish_batch()
        self._follow()

    @override
    def _next_iteration(self) -> None:
        super()._next_iteration()
        self._follow()

    @override
    def _end_iteration(self) -> tuple[list[int], int, int] | None:
        ended = super()._end_iteration()
        self._follow()
        return ended

    @override
    def _open_span(self, name: str) -> None:
        super()._open_span(name)
        self._follow()

    @override
    def _close_span(self, name: str | None = None) -> None:
        super()._close_span(name)
        self._follow()

    def _follow(self) -> None:
        phase = self.phase if self._started_at is not None and self._span is None else OUTSIDE
        if phase != self._marked:
            self._marked = phase
            self._mark(phase)


def charge_marks(phases: list[int], times_ns: list[int]) -> tuple[list[int], int]:
    """Nanoseconds by `Phase`, and in total, of an iteration.

    Args:
        phases: What begins at each mark; the last one is `OUTSIDE`.
        times_ns: When the device came to it: as many, never decreasing.
    """
    charged = [0] * len(Phase)
    for phase, start, end in zip(phases, times_ns, times_ns[1:], strict=False):
        if phase != OUTSIDE:
            charged[phase] += end - start
    return charged, sum(charged)
