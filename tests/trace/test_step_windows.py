import numpy as np
import pytest

from lightning_hpc.trace import Trace
from lightning_hpc.trace.records import PHASES
from lightning_hpc.trace.step_table import WARM_UP_STEPS, StepTable
from lightning_hpc.trace.step_windows import WINDOW_COLUMNS, table_of_windows
from lightning_hpc.trace.stragglers import find_stragglers
from tests.trace.judging import SLOW_PHASES, Confusion, confusion_table, right_share
from tests.trace.synthetic_runs import JOBS, Slow, simulate


def windows_of(traces: list[Trace], interval: int = 50) -> np.ndarray:
    """The first windows, as `StragglerMonitor` sends them: without the warm-up, filled up."""
    windows = np.full((len(traces), interval, len(WINDOW_COLUMNS)), np.nan)
    for rank, trace in enumerate(traces):
        for row, step in enumerate(trace.steps[WARM_UP_STEPS:interval]):
            times = [step[f"{name}_ms"] for name in (*PHASES, "total")]
            windows[rank, row] = np.array([*times, step["epoch"], step["batch"]], dtype=np.float64)  # None becomes NaN
    return windows


def test_a_window_is_the_table_of_its_records() -> None:
    traces = simulate(JOBS["4 ranks"], 0, steps=50)
    table, expected = table_of_windows(windows_of(traces)), StepTable.align(traces)
    assert (table.ranks, table.steps, table.recorded) == (expected.ranks, expected.steps, expected.steps)
    for phase in ("data_prep", "comm", "schedule", "total"):
        np.testing.assert_array_equal(table.times[phase], expected.times[phase])


def test_iterations_that_a_rank_lacks_are_left_out() -> None:
    windows = windows_of(simulate(JOBS["2 ranks"], 0, steps=50))
    windows[1] = np.concatenate([windows[1][10:], np.full((10, len(WINDOW_COLUMNS)), np.nan)])
    table = table_of_windows(windows)
    assert table.steps == 47 - 10
    np.testing.assert_array_equal(table.times["forward"][1], windows[1, :37, WINDOW_COLUMNS.index("forward")])
    np.testing.assert_array_equal(table.times["forward"][0], windows[0, 10:47, WINDOW_COLUMNS.index("forward")])


def test_windows_with_nothing_in_common_have_no_steps() -> None:
    windows = windows_of(simulate(JOBS["2 ranks"], 0, steps=50))
    windows[1] = np.nan
    table = table_of_windows(windows)
    assert table.steps == 0
    assert find_stragglers(table) == ()


def test_unknown_communication_stays_unknown() -> None:
    windows = windows_of(simulate(JOBS["2 ranks"], 0, steps=50, with_comm=False))
    assert not table_of_windows(windows).knows_comm


def judge_windows(seeds: range) -> Confusion:
    """One window of 50 steps of each job with several ranks, of which one needs a tenth of a step more."""
    confusion: Confusion = Confusion()
    for seed in seeds:
        for job in (job for job in JOBS.values() if job.ranks > 1):
            for phase, cause in SLOW_PHASES.items():
                slow = Slow(seed % job.ranks, phase, 0.1)
                found = find_stragglers(table_of_windows(windows_of(simulate(job, seed, steps=50, slow=(slow,)))))
                named = f"{found[0].cause} of rank {found[0].rank}" if found else "healthy"
                confusion[f"{cause} of rank r", named.replace(f"rank {slow.rank}", "rank r")] += 1
    return confusion


def test_a_rank_that_is_a_tenth_slower_is_named_with_its_cause_within_50_steps() -> None:
    confusion = judge_windows(range(4))
    assert right_share(confusion) >= 0.95, confusion_table(confusion)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_equal_ranks_are_not_told_apart(ranks: int) -> None:
    windows = [windows_of(simulate(JOBS[f"{ranks} ranks"], seed, steps=50)) for seed in range(8)]
    assert not any(find_stragglers(table_of_windows(each)) for each in windows)
