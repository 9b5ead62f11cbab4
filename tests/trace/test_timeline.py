"""A clock that is set by hand drives the timeline through what Lightning's loops do."""

import itertools

import pytest

from lightning_hpc.trace.timeline import Phase, Span, Timeline

FORWARD, BACKWARD, OPTIMIZER, SCHEDULE = map(int, (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.SCHEDULE))


class Driver:
    """A timeline, its clock, and what it has handed out."""

    def __init__(self) -> None:
        self.now = 1000
        self.steps: list[tuple[dict[str, int], int]] = []
        self.starts: list[int] = []
        self.spans: list[Span] = []
        self.timeline = Timeline(lambda: self.now, self._add_step, self.spans.append)

    def _add_step(self, charged_ns: list[int], start_ns: int, total_ns: int) -> None:
        times = {phase.name.lower(): charged_ns[phase] for phase in Phase if charged_ns[phase]}
        self.steps.append((times, total_ns))
        self.starts.append(start_ns)

    def wait(self, nanoseconds: int) -> None:
        self.now += nanoseconds

    def fetch(self, nanoseconds: int) -> None:
        self.timeline.start_fetch()
        self.wait(nanoseconds)
        self.timeline.stop_fetch()

    def transfer(self, before: int, during: int) -> None:
        self.wait(before)
        self.timeline.start_transfer()
        self.wait(during)
        self.timeline.stop_transfer()

    def phase(self, phase: int, nanoseconds: int) -> None:
        self.timeline.push(phase)
        self.wait(nanoseconds)
        self.timeline.pop()

    def train(self, forward: int = 1) -> None:
        self.timeline.start_batch()
        self.phase(FORWARD, forward)
        self.timeline.finish_batch()

    def span_times(self) -> list[tuple[str, int | None, int, int]]:
        return [(span.name, span.epoch, span.start_ns, span.duration_ns) for span in self.spans]


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_each_nanosecond_goes_to_the_phase_on_top(driver: Driver) -> None:
    driver.timeline.enter_epoch(0)
    driver.fetch(10)
    driver.transfer(1, 20)
    driver.wait(3)  # the loop's own
    driver.timeline.start_batch()
    driver.timeline.push(OPTIMIZER)
    driver.wait(100)
    driver.phase(FORWARD, 200)
    driver.timeline.push(BACKWARD)
    driver.wait(300)
    driver.phase(SCHEDULE, 5)
    driver.wait(30)
    driver.timeline.pop()
    driver.wait(40)
    driver.timeline.pop()
    driver.timeline.finish_batch()
    driver.wait(7)
    driver.timeline.exit_epoch()
    times = {"data_prep": 10, "h2d": 21, "schedule": 15, "forward": 200, "backward": 330, "optimizer": 140}
    assert driver.steps == [(times, sum(times.values()))]


def test_an_iteration_ends_where_the_next_fetch_starts(driver: Driver) -> None:
    driver.timeline.enter_epoch(0)
    for schedule in (5, 6):
        driver.fetch(10)
        driver.transfer(0, 2)
        driver.train(100)
        driver.wait(schedule)
    assert driver.steps == [({"data_prep": 10, "h2d": 2, "forward": 100, "schedule": 5}, 117)]
    driver.timeline.exit_epoch()
    assert driver.steps[1] == ({"data_prep": 10, "h2d": 2, "forward": 100, "schedule": 6}, 118)


def test_a_look_ahead_loader_fetches_twice_in_its_first_iteration(driver: Driver) -> None:
    driver.timeline.enter_epoch(0)
    driver.fetch(10)
    driver.wait(4)  # between the fetches nothing is transferred
    driver.fetch(20)
    driver.transfer(1, 2)
    driver.train(100)
    driver.fetch(30)
    assert driver.steps == [({"data_prep": 30, "h2d": 3, "schedule": 4, "forward": 100}, 137)]


def test_a_batch_without_a_fetch_opens_the_iteration_and_its_fetch_is_nested(driver: Driver) -> None:
    driver.timeline.enter_epoch(0)
    driver.wait(3)
    for _ in range(2):
        driver.timeline.start_batch()
        driver.timeline.push(FORWARD)
        driver.wait(100)
        driver.fetch(10)
        driver.wait(50)
        driver.timeline.pop()
        driver.timeline.finish_batch()
        driver.wait(5)
    driver.timeline.exit_epoch()
    assert driver.steps == [({"data_prep": 10, "forward": 150, "schedule": 5}, 165)] * 2


def test_spans_lie_between_iterations_and_carry_their_epoch(driver: Driver) -> None:
    driver.wait(50)
    for epoch in (0, 1):
        driver.timeline.enter_epoch(epoch)
        driver.wait(7)
        driver.fetch(10)
        driver.train(100)
        driver.timeline.exit_epoch()
        driver.wait(9)
    driver.timeline.close()
    assert driver.span_times() == [
        ("startup", None, 0, 50),
        ("loader_start", 0, 50, 7),
        ("between_epochs", 0, 167, 9),
        ("loader_start", 1, 176, 7),
        ("shutdown", 1, 293, 9),
    ]
    assert sum(total for _, total in driver.steps) + sum(span.duration_ns for span in driver.spans) == driver.now - 1000


def test_validation_is_taken_out_of_the_iteration(driver: Driver) -> None:
    driver.timeline.enter_epoch(0)
    driver.fetch(10)
    driver.train(100)
    driver.wait(1)
    driver.timeline.start_validation()
    driver.timeline.start_validation()  # Lightning may announce it twice
    driver.wait(1000)
    driver.transfer(500, 500)
    driver.phase(SCHEDULE, 1000)
    driver.timeline.stop_validation()
    driver.wait(2)
    driver.timeline.exit_epoch()
    assert driver.steps == [({"data_prep": 10, "forward": 100, "schedule": 3}, 113)]
    assert ("validation", 0, 111, 3000) in driver.span_times()


def test_validation_outside_iterations_is_part_of_its_span(driver: Driver) -> None:
    driver.timeline.start_validation()
    driver.wait(10)
    driver.timeline.stop_validation()
    driver.timeline.enter_epoch(0)
    assert driver.span_times() == [("startup", None, 0, 10)]


def test_a_validation_that_was_announced_and_skipped_ends_with_the_next_fetch(driver: Driver) -> None:
    driver.timeline.enter_epoch(0)
    driver.fetch(10)
    driver.train(100)
    driver.timeline.start_validation()
    driver.wait(4)
    driver.fetch(10)
    assert driver.steps == [({"data_prep": 10, "forward": 100}, 110)]
    assert ("validation", 0, 110, 4) in driver.span_times()


def test_an_exception_leaves_the_finished_iterations(driver: Driver) -> None:
    driver.timeline.enter_epoch(0)
    driver.fetch(10)
    driver.train(100)
    driver.fetch(20)
    driver.timeline.start_batch()
    driver.wait(30)
    driver.timeline.exit_epoch()
    driver.timeline.close()
    driver.timeline.close()
    assert [total for _, total in driver.steps] == [110]
    assert driver.span_times()[2:] == [("unfinished_iteration", 0, 110, 50), ("shutdown", 0, 160, 0)]


def test_closing_in_the_middle_of_an_epoch_hands_out_what_is_finished(driver: Driver) -> None:
    driver.timeline.enter_epoch(0)
    driver.fetch(10)
    driver.train(100)
    driver.timeline.close()
    assert [total for _, total in driver.steps] == [110]


def test_a_phase_left_open_by_an_exception_ends_with_its_batch(driver: Driver) -> None:
    driver.timeline.enter_epoch(0)
    for _ in range(2):
        driver.fetch(10)
        driver.timeline.start_batch()
        driver.timeline.push(OPTIMIZER)  # never popped: the training step has caught what its optimizer raised
        driver.wait(100)
        driver.timeline.finish_batch()
        driver.wait(5)
    driver.timeline.exit_epoch()
    assert driver.steps == [({"data_prep": 10, "optimizer": 100, "schedule": 5}, 115)] * 2
    driver.timeline.pop()  # a stray end is no error


def test_work_on_handed_out_records_is_schedule_of_the_next_iteration(driver: Driver) -> None:
    timeline = driver.timeline
    timeline._on_step = lambda *step: (driver._add_step(*step), driver.wait(8))[0]  # type: ignore[func-returns-value]
    timeline.enter_epoch(0)
    for _ in range(3):
        driver.fetch(10)
        driver.train(100)
    assert driver.steps == [
        ({"data_prep": 10, "forward": 100}, 110),
        ({"schedule": 8, "data_prep": 10, "forward": 100}, 118),
    ]


def write_checkpoint(driver: Driver, nanoseconds: int) -> None:
    driver.timeline.start_span("checkpoint")
    driver.wait(nanoseconds)
    driver.timeline.stop_span()


def test_a_span_within_an_iteration_is_taken_out_of_it(driver: Driver) -> None:
    timeline = driver.timeline
    timeline.enter_epoch(0)
    driver.fetch(10)
    timeline.start_batch()
    timeline.push(OPTIMIZER)
    driver.wait(5)
    write_checkpoint(driver, 400)
    driver.wait(2)
    timeline.pop()
    timeline.finish_batch()
    driver.fetch(10)
    assert driver.steps == [({"data_prep": 10, "optimizer": 7}, 17)]
    assert driver.starts == [0]
    assert [(span.name, span.parent, span.duration_ns) for span in driver.spans[1:]][-1] == ("checkpoint", None, 400)


def test_spans_within_spans_name_what_holds_them(driver: Driver) -> None:
    timeline = driver.timeline
    write_checkpoint(driver, 3)
    timeline.enter_epoch(0)
    driver.fetch(10)
    driver.train(20)
    timeline.start_validation()
    driver.wait(30)
    timeline.start_span("checkpoint")
    driver.wait(1)
    timeline.start_span("logging")
    driver.wait(2)
    timeline.stop_span()
    timeline.stop_span()
    timeline.stop_validation()
    timeline.exit_epoch()
    write_checkpoint(driver, 4)
    timeline.close()
    assert [(span.name, span.parent, span.duration_ns) for span in driver.spans] == [
        ("checkpoint", "startup", 3),
        ("startup", None, 3),
        ("loader_start", None, 0),
        ("logging", "checkpoint", 2),
        ("checkpoint", "validation", 3),
        ("validation", None, 33),
        ("checkpoint", "between_epochs", 4),
        ("shutdown", None, 4),
    ]
    assert driver.steps == [({"data_prep": 10, "forward": 20}, 30)]


def test_a_span_that_ends_after_the_fit_is_not_handed_out(driver: Driver) -> None:
    driver.timeline.start_span("checkpoint")
    driver.timeline.close()
    handed_out = len(driver.spans)
    driver.timeline.stop_span()
    write_checkpoint(driver, 5)
    assert len(driver.spans) == handed_out


def test_iterations_know_when_they_began(driver: Driver) -> None:
    driver.wait(7)
    driver.timeline.enter_epoch(0)
    for _ in range(3):
        driver.fetch(10)
        driver.train(100)
    driver.timeline.exit_epoch()
    assert driver.starts == [7, 117, 227]


def test_what_is_handed_out_is_not_touched_again(driver: Driver) -> None:
    timeline = driver.timeline
    handed_out: list[list[int]] = []
    timeline._on_step = lambda charged, *_: handed_out.append(charged)
    timeline.enter_epoch(0)
    driver.fetch(10)
    driver.train(100)
    timeline.exit_epoch()
    before = [list(charged) for charged in handed_out]
    driver.wait(1000)
    timeline.enter_epoch(1)
    driver.fetch(10)
    assert handed_out == before


def test_no_time_counts_twice_where_each_reading_of_the_clock_takes_some() -> None:
    readings = itertools.count()
    stretches: list[tuple[int, int]] = []
    timeline = Timeline(
        lambda: next(readings),
        lambda _, start, total: stretches.append((start, start + total)),
        lambda span: stretches.append((span.start_ns, span.start_ns + span.duration_ns)),
    )
    for epoch in range(2):
        timeline.enter_epoch(epoch)
        for _ in range(2):
            timeline.start_fetch()
            timeline.stop_fetch()
            timeline.start_batch()
            timeline.finish_batch()
        timeline.exit_epoch()
    timeline.close()
    stretches.sort()
    assert len(stretches) == 4 + 2 + 3  # iterations, loader starts, and the spans around epochs
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(stretches))
