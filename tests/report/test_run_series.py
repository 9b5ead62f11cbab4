import numpy as np
import pytest

from lightning_hpc.report.run_series import MOST_POINTS, Curve, lane_of, series_of
from lightning_hpc.trace.records import PHASES
from tests.report.run_traces import make_traces


@pytest.mark.parametrize("steps", [1, 2, MOST_POINTS - 1, MOST_POINTS + 1, 5000])
def test_points_are_bounded_and_no_spike_is_lost(steps: int) -> None:
    (trace,) = make_traces("1 ms", steps=steps)
    trace.steps[steps // 2]["total_ms"] = 12345.0
    series = series_of([trace])
    curve = series.step_ms
    assert len(curve.times_s) == len(curve.high) == min(steps, MOST_POINTS)
    assert max(value for value in curve.high if value is not None) == 12345.0
    assert sum(series.step_histogram.counts) == steps
    assert all(len(values) == len(series.phase_times_s) for values in series.phases_ms.values())


def test_stretches_hold_all_steps_of_all_ranks() -> None:
    traces = make_traces("4 ranks", steps=300)
    traces[2] = type(traces[2])(traces[2].path, traces[2].header, traces[2].records[:-50])  # it ended earlier
    series = series_of(traces)
    assert set(series.phases_ms) == set(PHASES)
    lowest = min(step["total_ms"] for trace in traces for step in trace.steps)
    assert min(value for value in series.step_ms.low if value is not None) == lowest
    assert series.comm_bytes is not None
    assert series.throughput is not None


def test_gaps_are_none() -> None:
    values = [None] * 300 + [1.0, 2.0]
    curve = Curve.of("memory", list(range(302)), values)
    assert curve is not None
    assert curve.middle[0] is None
    assert curve.high[-1] == 2.0
    assert Curve.of("memory", [0.0], [None]) is None
    assert Curve.of("memory", [], []) is None


def test_throughput_is_the_sum_of_the_ranks() -> None:
    traces = make_traces("2 ranks", steps=10)
    for trace in traces:
        for step in trace.steps:
            step["samples"], step["total_ms"] = 8, 4.0
    curve = series_of(traces).throughput
    assert curve is not None
    np.testing.assert_allclose(np.array(curve.middle, dtype=float), 2 * 8 / 4e-3)


@pytest.mark.parametrize(("steps", "ranks", "points"), [(1, 1, 1), (300, 1, 60), (300, 64, 23), (300, 1000, 8)])
def test_a_lane_is_the_mean_of_each_stretch_and_many_lanes_are_coarser(steps: int, ranks: int, points: int) -> None:
    (trace,) = make_traces("1 ms", steps=steps)
    lane = lane_of(trace, ranks)
    assert len(lane.times_s) == points
    assert list(lane.times_s) == sorted(lane.times_s)
    for phase in lane.phases_ms:
        recorded = [step[f"{phase}_ms"] for step in trace.steps]
        stretches = [part.mean() for part in np.array_split(np.array(recorded), points)]
        assert np.allclose(lane.phases_ms[phase], stretches)
