from dataclasses import replace

import numpy as np
import pytest

from lightning_hpc.report.comparison import Comparison, GateSettings, Verdict, compare_runs
from lightning_hpc.report.run_sample import RunSample
from tests.report.runs import SHARES, Noise, make_run, make_sides, make_times
from tests.report.soak_comparison import ALL_PHASES, ONE_PHASE, plant, real_sides, simulate

QUIET = Noise(run_spread=0.003)
BUSY = Noise(run_spread=0.003, busy=0.2)


def alarms(comparisons: list[Comparison]) -> int:
    return sum(comparison.is_regression for comparison in comparisons)


# The soak runs thousands of these: tests/report/soak_comparison.py. Seeds are fixed, so these counts are too.
@pytest.mark.parametrize(("runs", "noise"), [(1, QUIET), (1, BUSY), (3, QUIET), (3, BUSY)])
def test_equal_runs_raise_no_alarm(runs: int, noise: Noise) -> None:
    assert alarms(simulate(12, runs, 300, noise, None, seed=7)) == 0


@pytest.mark.parametrize("growth", [ALL_PHASES, ONE_PHASE], ids=["total", "forward"])
@pytest.mark.parametrize(("runs", "noise"), [(3, QUIET), (8, BUSY)], ids=["quiet", "busy"])
def test_five_percent_are_caught(runs: int, noise: Noise, growth: dict[str, float]) -> None:
    assert alarms(simulate(10, runs, 400, noise, growth, seed=8)) >= 9


def test_runs_that_did_not_take_turns_raise_no_alarm_either() -> None:
    assert alarms(simulate(10, 3, 300, BUSY, None, seed=9, in_turns=False)) == 0


def test_a_run_that_is_slower_from_end_to_end_is_told_from_a_regression_by_several_runs() -> None:
    base, new = make_sides(np.random.default_rng(3), 4, 400, QUIET)
    slow_run = plant(new[0], 0.2, tuple(SHARES))
    assert not compare_runs(base, [slow_run, *new[1:]]).is_regression
    assert compare_runs(base[:1], [slow_run]).is_regression  # which one pair cannot tell


def test_an_improvement_is_no_regression_and_the_mirror_of_one() -> None:
    base, new = make_sides(np.random.default_rng(4), 4, 400, QUIET, ALL_PHASES)
    there, back = compare_runs(base, new), compare_runs(new, base)
    assert there.total.verdict is Verdict.REGRESSION
    assert back.total.verdict is Verdict.IMPROVEMENT
    assert not back.is_regression
    assert there.total.median is not None
    assert back.total.median is not None
    assert there.total.median.ratio * back.total.median.ratio == pytest.approx(1)
    assert there.total.median.low == pytest.approx(1 / back.total.median.high)


def test_the_phase_that_has_grown_is_named_and_no_other() -> None:
    comparison = compare_runs(*make_sides(np.random.default_rng(5), 4, 400, QUIET, ONE_PHASE))
    verdicts = {phase.figure: phase.verdict for phase in comparison.phases}
    assert verdicts.pop("forward") is Verdict.REGRESSION
    assert set(verdicts.values()) == {Verdict.SAME}
    forward = next(phase for phase in comparison.phases if phase.figure == "forward")
    assert forward.share_of_step == pytest.approx(0.05, abs=0.01)


def test_a_small_phase_that_doubles_does_not_count() -> None:
    comparison = compare_runs(*make_sides(np.random.default_rng(6), 4, 400, QUIET, {"h2d": 0.01}))
    h2d = next(phase for phase in comparison.phases if phase.figure == "h2d")
    assert h2d.median is not None
    assert h2d.median.low > 1.3
    assert h2d.verdict is Verdict.SAME
    assert not comparison.is_regression


def test_time_that_moves_between_phases_does_not_count() -> None:
    moved = {"forward": 0.05, "backward": -0.05}
    comparison = compare_runs(*make_sides(np.random.default_rng(7), 5, 400, QUIET, moved))
    verdicts = {phase.figure: phase.verdict for phase in comparison.phases}
    assert verdicts["forward"] is Verdict.REGRESSION
    assert verdicts["backward"] is Verdict.IMPROVEMENT
    assert comparison.regressed_phases == []
    assert not comparison.is_regression


def test_the_threshold_and_the_confidence_are_held_to() -> None:
    base, new = make_sides(np.random.default_rng(8), 5, 400, QUIET, ALL_PHASES)
    assert not compare_runs(base, new, GateSettings(threshold=0.1)).is_regression
    wide, narrow = (compare_runs(base, new, GateSettings(confidence=share)).total.median for share in (0.999, 0.9))
    assert wide is not None
    assert narrow is not None
    assert wide.low < narrow.low < narrow.high < wide.high


@pytest.mark.parametrize("values", [{"threshold": -0.1}, {"threshold": 11}, {"confidence": 1}, {"confidence": 0.4}])
def test_settings_out_of_bounds_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="usual"):
        GateSettings(**values)


def test_too_much_noise_is_said_and_not_taken_for_equality() -> None:
    base, new = make_sides(np.random.default_rng(9), 3, 400, Noise(run_spread=0.1))
    comparison = compare_runs(base, new)
    assert comparison.total.verdict is Verdict.NOISY
    assert not comparison.is_regression


def test_a_phase_that_one_run_has_not_measured_is_left_out() -> None:
    base, new = make_sides(np.random.default_rng(10), 2, 400, QUIET)
    times = {figure: values for figure, values in new[0].times_ms.items() if figure != "comm"}
    comparison = compare_runs(base, [replace(new[0], times_ms=times), new[1]])
    assert comparison.left_out == ("comm",)
    assert "comm" not in [phase.figure for phase in comparison.phases]


def test_a_side_without_runs_is_too_short() -> None:
    base, _ = make_sides(np.random.default_rng(11), 1, 400, QUIET)
    comparison = compare_runs(base, [])
    assert comparison.total.verdict is Verdict.SHORT
    assert not comparison.is_regression


def test_one_run_against_several_borrows_how_runs_differ() -> None:
    base, new = make_sides(np.random.default_rng(12), 5, 400, Noise(run_spread=0.03))
    look, few = compare_runs(base, new[:1]).total.median, compare_runs(base[:1], new[:1]).total.median
    assert look is not None
    assert few is not None
    assert look.high / look.low > few.high / few.low


def test_turns_are_seen_from_the_times_of_the_runs() -> None:
    run = make_run(make_times(np.random.default_rng(13), 400, QUIET), 0)

    def at(*times: float) -> list[RunSample]:
        return [replace(run, started_at=time) for time in times]

    assert compare_runs(at(0, 2, 4), at(1, 3, 5)).is_interleaved
    assert compare_runs(at(0, 3), at(1, 2)).is_interleaved  # A B B A
    assert not compare_runs(at(0, 1, 2), at(3, 4, 5)).is_interleaved
    assert not compare_runs(at(0), at(1)).is_interleaved
    assert not compare_runs(at(0, 1, 2), at(3)).is_interleaved


def test_real_pairs_are_disjoint_where_there_are_enough_runs() -> None:
    base, _ = make_sides(np.random.default_rng(14), 8, 400, QUIET)
    seen = [run.started_at for sides in real_sides(base, 2, 2, 0, in_turns=True) for side in sides for run in side]
    assert sorted(seen) == [run.started_at for run in base]
