from dataclasses import replace

import numpy as np
import pytest

from lightning_hpc.trace import Trace
from lightning_hpc.trace.step_table import WARM_UP_STEPS, StepTable
from tests.trace.synthetic_runs import JOBS, simulate


def without(trace: Trace, batch: int) -> Trace:
    return replace(trace, records=tuple(each for each in trace.records if each.get("batch") != batch))


def test_ranks_are_aligned_by_batch_and_the_warm_up_is_left_out() -> None:
    traces = simulate(JOBS["2 ranks"], 0, steps=12)
    table = StepTable.align([without(traces[1], 7), without(traces[0], 5)])
    assert table.ranks == (0, 1)
    assert (table.recorded, table.steps) == (10, 10 - WARM_UP_STEPS)
    assert [step["batch"] for step in table.records[1]] == [3, 4, 6, 8, 9, 10, 11]
    assert table.times["forward"][1, 2] == traces[1].steps[6]["forward_ms"]
    np.testing.assert_array_equal(table.shared("forward"), table.times["forward"].min(axis=0))
    assert table.knows_comm


def test_spans_stand_at_the_first_step_of_their_epoch() -> None:
    job = replace(JOBS["50 ms"], epoch=8)
    table = StepTable.align(simulate(job, 0, steps=20))
    assert np.flatnonzero(table.times["loader_start"][0]).tolist() == [8 - WARM_UP_STEPS, 16 - WARM_UP_STEPS]
    parts = sum(table.times[name][0] for name in table.times if name not in ("total", "checkpoint", "logging"))
    np.testing.assert_allclose(parts, table.times["total"][0])


def test_unknown_communication_is_not_zero() -> None:
    table = StepTable.align(simulate(JOBS["2 ranks"], 0, with_comm=False))
    assert not table.knows_comm
    assert np.isnan(table.times["comm"]).all()


def test_fewer_steps_than_the_warm_up_leave_none() -> None:
    table = StepTable.align(simulate(JOBS["10 ms"], 0, steps=2))
    assert (table.recorded, table.steps) == (2, 0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_slow_alone_is_not_shared(ranks: int) -> None:
    traces = simulate(JOBS[f"{ranks} ranks"], 0)
    for step in traces[-1].steps:
        step["data_prep_ms"] += 1e6
    assert StepTable.align(traces).shared("data_prep").max() < 1e5


def test_what_is_written_within_an_iteration_is_its_schedule() -> None:
    (trace,) = simulate(JOBS["10 ms"], 0, steps=12)
    step = trace.steps[5]
    inside = {"type": "span", "name": "checkpoint", "parent": None, "epoch": 0, "rank": 0, "duration_ms": 40.0}
    inside["start_ms"] = step["start_ms"] + step["total_ms"] / 2
    written = replace(trace, records=(*trace.records, inside, {**inside, "parent": "validation"}))
    plain, table = StepTable.align([trace]), StepTable.align([written])
    assert table.times["checkpoint"].sum() == 40.0
    assert table.times["logging"].sum() == 0.0
    for name in ("schedule", "total"):
        difference = table.times[name][0] - plain.times[name][0]
        np.testing.assert_allclose(difference, 40.0 * (np.arange(len(difference)) == 5 - WARM_UP_STEPS))
