"""What the host's timeline and the marks say about the same loop, where the device does everything at once."""

import random

import pytest

from lightning_hpc.trace.marked_timeline import OUTSIDE, MarkedTimeline, charge_marks
from lightning_hpc.trace.timeline import Phase, Span

PHASES = [int(phase) for phase in Phase]


class Marked:
    def __init__(self) -> None:
        self.now = 0
        self.marks: list[tuple[int, int]] = []
        self.host: list[tuple[list[int], int]] = []
        self.device: list[tuple[list[int], int]] = []
        self.spans: list[Span] = []
        self.timeline = MarkedTimeline(
            *(lambda: self.now, self.add_step, self.spans.append, None),
            lambda phase: self.marks.append((phase, self.now)),
        )

    def add_step(self, charged_ns: list[int], start_ns: int, total_ns: int) -> None:
        assert self.marks[-1][0] == OUTSIDE
        self.host.append((list(charged_ns), total_ns))
        phases, times = zip(*self.marks, strict=True)
        self.device.append(charge_marks(list(phases), list(times)))
        self.marks.clear()


@pytest.fixture
def marked() -> Marked:
    return Marked()


@pytest.mark.parametrize("seed", range(20))
def test_a_device_that_keeps_up_has_the_hosts_times(marked: Marked, seed: int) -> None:
    generator = random.Random(seed)
    timeline = marked.timeline

    def work(depth: int = 0) -> None:
        marked.now += generator.randrange(1, 100)
        for _ in range(generator.randrange(3) if depth < 3 else 0):
            timeline.push(generator.choice(PHASES))
            work(depth + 1)
            timeline.pop()

    for epoch in range(2):
        timeline.enter_epoch(epoch)
        work()
        for _ in range(5):
            timeline.start_fetch()
            work(3)
            timeline.stop_fetch()
            work(3)
            timeline.start_transfer()
            work(3)
            timeline.stop_transfer()
            timeline.start_batch()
            work()
            timeline.finish_batch()
            work()
            if generator.random() < 0.5:
                timeline.start_validation()
                work()
                timeline.start_span("checkpoint")
                work()
                timeline.stop_span()
                timeline.stop_validation()
            if generator.random() < 0.5:
                timeline.start_span("checkpoint")
                marked.now += 1000
                timeline.stop_span()
        timeline.exit_epoch()
        work()
    timeline.close()
    assert len(marked.host) == 10
    assert marked.device == marked.host


def test_a_mark_is_made_only_where_the_phase_changes(marked: Marked) -> None:
    timeline = marked.timeline
    timeline.enter_epoch(0)
    timeline.start_fetch()
    timeline.stop_fetch()
    timeline.start_transfer()
    timeline.stop_transfer()
    timeline.push(int(Phase.FORWARD))
    timeline.push(int(Phase.FORWARD))
    timeline.pop()
    timeline.pop()
    timeline.finish_batch()
    expected = [Phase.SCHEDULE, Phase.DATA_PREP, Phase.H2D, Phase.SCHEDULE, Phase.FORWARD, Phase.SCHEDULE]
    assert [phase for phase, _ in marked.marks] == expected


def test_an_iteration_that_was_not_finished_leaves_no_mark_in_the_next(marked: Marked) -> None:
    timeline = marked.timeline
    timeline.enter_epoch(0)
    timeline.start_fetch()
    timeline.exit_epoch()
    timeline.enter_epoch(1)
    timeline.start_fetch()
    marked.now += 5
    timeline.stop_fetch()
    timeline.start_batch()
    timeline.finish_batch()
    timeline.exit_epoch()
    assert marked.device == marked.host
