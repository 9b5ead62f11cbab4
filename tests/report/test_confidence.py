import math

import numpy as np
import pytest

from lightning_hpc.report.confidence import resample, student_quantile
from lightning_hpc.report.run_sample import BLOCKS, LEVELS, MIN_STEPS, reduce_times


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 63.6567), (2, 9.9248), (3, 5.8409), (4, 4.6041), (10, 3.1693), (120, 2.6174)]
)
def test_quantiles_of_student_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert student_quantile(0.995, freedom) == pytest.approx(expected, abs=1e-4)


def test_quantiles_fall_with_the_degrees_of_freedom_also_between_whole_ones() -> None:
    values = [student_quantile(0.995, freedom) for freedom in np.linspace(1, 30, 59)]
    assert values == sorted(values, reverse=True)
    assert student_quantile(0.995, 500) == pytest.approx(student_quantile(0.995, 10**9), rel=0.01)
    assert student_quantile(0.5, 3) == pytest.approx(0, abs=1e-9)


def test_order_statistics_keep_the_quantiles_of_the_steps() -> None:
    times = np.random.default_rng(0).gamma(9, 1, 5000)
    reduced = reduce_times(list(times))
    assert reduced.shape == (BLOCKS, LEVELS)
    for share in (0.25, 0.5, 0.75):
        assert float(np.quantile(reduced, share)) == pytest.approx(float(np.quantile(times, share)), rel=0.02)
    assert (reduce_times([0.0] * MIN_STEPS) > 0).all()


@pytest.mark.parametrize("runs", [1, 3, 6])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_the_variance_is_that_of_repeated_estimates(runs: int, share: float) -> None:
    generator = np.random.default_rng(1)
    spread = 0.0 if runs == 1 else 0.02
    estimates = []
    for _ in range(100):
        levels = generator.normal(0, spread, runs)
        samples = [reduce_times(list(np.exp(level + generator.normal(0, 0.2, 400)))) for level in levels]
        estimates.append(resample(samples, [share])[0].estimate())
    observed = np.std([found.log for found in estimates])
    expected = math.sqrt(np.mean([found.variance for found in estimates]))
    assert expected == pytest.approx(observed, rel=0.25)


def test_phases_add_up_with_what_they_have_in_common() -> None:
    generator = np.random.default_rng(2)
    samples = [reduce_times(list(np.exp(generator.normal(0, 0.1, 400)))) for _ in range(3)]
    (once,) = resample(samples, [0.5])
    twice = once + once
    assert twice.value == pytest.approx(2 * once.value)
    # The same phase twice is no more certain than once.
    assert twice.estimate().variance == pytest.approx(once.estimate().variance)
    assert twice.estimate().log == pytest.approx(math.log(2) + once.estimate().log)


def test_runs_that_agree_by_chance_are_not_believed() -> None:
    run = reduce_times(list(np.exp(np.random.default_rng(3).normal(0, 0.3, 400))))
    (found,) = resample([run, run, run], [0.5])
    assert np.var(found.between) < 1e-20
    assert found.estimate().variance > 1e-5


def test_the_same_samples_give_the_same_estimate() -> None:
    samples = [reduce_times(list(np.random.default_rng(seed).gamma(9, 1, 400))) for seed in range(3)]
    first, second = (resample(samples, [0.5])[0].estimate() for _ in range(2))
    assert first == second
