from dataclasses import replace

import numpy as np
import pytest

from lightning_hpc.trace.diagnosis import diagnose
from lightning_hpc.trace.step_table import StepTable
from lightning_hpc.trace.stragglers import Straggler, _median_of_others, find_stragglers
from tests.trace.judging import SLOW_PHASES, confusion_table, judge_stragglers, right_share
from tests.trace.synthetic_runs import JOBS, Slow, simulate

FOUR = JOBS["4 ranks"]


def find(*slow: Slow, seed: int = 0, steps: int = 50, variation: float | None = None) -> tuple[Straggler, ...]:
    return find_stragglers(StepTable.align(simulate(FOUR, seed, steps=steps, slow=slow, variation=variation)))


def test_a_rank_that_is_a_tenth_slower_is_named_with_its_cause_within_50_steps() -> None:
    confusion = judge_stragglers(range(4))
    assert right_share(confusion) >= 0.95, confusion_table(confusion)


def test_a_rank_that_is_slow_at_times_is_named() -> None:
    confusion = judge_stragglers(range(3), every=5, slower=0.2)
    assert right_share(confusion) >= 0.9, confusion_table(confusion)


@pytest.mark.parametrize("phase", SLOW_PHASES)
def test_what_if_the_rank_were_like_the_others(phase: str) -> None:
    (straggler,) = find(Slow(2, phase, 0.5), variation=0.01)
    assert (straggler.rank, straggler.cause) == (2, SLOW_PHASES[phase])
    assert straggler.own_ms - straggler.others_ms == pytest.approx(0.5 * FOUR.step_ms, rel=0.1)
    assert straggler.step_ms / straggler.repaired_ms == pytest.approx(1.5, rel=0.06)
    assert straggler.share == pytest.approx(1 / 3, abs=0.04)
    assert straggler.slow_steps == 1.0


def test_two_stragglers_by_different_phases_are_both_named_the_costly_one_first() -> None:
    first, second = find(Slow(1, "data_prep", 0.5), Slow(3, "compute", 0.25), variation=0.02)
    assert [(each.rank, each.cause) for each in (first, second)] == [(1, "data"), (3, "compute")]
    # The second is hidden behind the first: repairing the first brings no more than the difference.
    assert first.repaired_ms / FOUR.step_ms == pytest.approx(1.27, abs=0.06)
    assert second.step_ms == first.repaired_ms
    assert second.repaired_ms / FOUR.step_ms == pytest.approx(1.03, abs=0.06)


def test_everyone_equally_slow_is_no_straggler() -> None:
    slow = [Slow(rank, "data_prep", 0.5) for rank in range(FOUR.ranks)]
    assert find(*slow) == ()
    diagnosis = diagnose(simulate(FOUR, 0, steps=50, slow=tuple(slow)))
    assert [(finding.dimension, finding.rank) for finding in diagnosis.findings] == [("data", None)]


def test_equal_ranks_are_not_told_apart() -> None:
    assert not any(find(seed=seed) for seed in range(20))


def test_communication_that_waits_for_a_straggler_is_not_the_network() -> None:
    diagnosis = diagnose(simulate(FOUR, 0, steps=50, slow=(Slow(0, "data_prep", 1.0),)))
    assert [(finding.dimension, finding.rank) for finding in diagnosis.findings] == [("data", 0)]
    assert "rank 0 spends" in diagnosis.headline


def test_victims_wait_in_schedule_and_are_not_blamed() -> None:
    # After the optimizer there is no collective but the flag before the next fetch.
    traces = simulate(FOUR, 0, steps=50, slow=(Slow(3, "optimizer", 0.5),))
    victim = sum(step["schedule_ms"] for step in traces[0].steps)
    assert victim > 10 * sum(step["schedule_ms"] for step in traces[3].steps)
    assert [(finding.dimension, finding.rank) for finding in diagnose(traces).findings] == [("compute", 3)]


def test_without_measured_communication_the_wait_in_backward_is_not_blamed() -> None:
    traces = simulate(FOUR, 0, steps=50, slow=(Slow(2, "data_prep", 0.5),), with_comm=False)
    assert [(finding.dimension, finding.rank) for finding in diagnose(traces).findings] == [("data", 2)]


def test_a_rank_short_of_memory_is_named_for_it() -> None:
    traces = simulate(FOUR, 0, steps=50, slow=(Slow(1, "compute", 0.3, every=3),))
    retries = 0
    for step in traces[1].steps:
        retries += step["batch"] % 3 == 0
        step["memory_retries"] = retries
    first = diagnose(traces).findings[0]
    assert (first.dimension, first.rank) == ("memory", 1)


def test_one_rank_alone_is_no_straggler() -> None:
    assert find_stragglers(StepTable.align(simulate(JOBS["50 ms"], 0, steps=50))) == ()


def test_too_few_steps_name_nobody() -> None:
    assert find(Slow(1, "data_prep", 0.5), steps=25) == ()


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 33])
def test_the_median_of_the_others_leaves_a_rank_out_also_among_equals(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    for values in (rng.random((ranks, 40)), rng.integers(3, size=(ranks, 40)).astype(float)):
        expected = [np.median(np.delete(values, row, axis=0), axis=0) for row in range(ranks)]
        np.testing.assert_array_equal(_median_of_others(values), expected)


@pytest.mark.parametrize(("delay_ms", "blamed"), [(0.4, False), (5.0, True)])
def test_a_flag_that_comes_late_is_no_work_of_who_waits_for_it(delay_ms: float, blamed: bool) -> None:
    # With plain DDP, rank 0 then waits as much longer in backward, where nobody measures it.
    traces = simulate(replace(JOBS["2 ranks"], step_ms=4), 0, steps=100, with_comm=False)
    rng = np.random.default_rng(0)
    for first, second in zip(traces[0].steps, traces[1].steps, strict=True):
        late = delay_ms * rng.uniform(0.5, 1.0)
        for step, phase in ((first, "backward_ms"), (second, "schedule_ms")):
            step[phase] += late
            step["total_ms"] += late
    found = find_stragglers(StepTable.align(traces))
    assert [(each.rank, each.cause) for each in found] == [(1, "framework")] * blamed
