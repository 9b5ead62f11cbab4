import random

import pytest

from lightning_hpc.trace.outlier_watch import LEAST_STEPS, OutlierWatch
from lightning_hpc.trace.step_table import WARM_UP_STEPS

FIRST_JUDGED = WARM_UP_STEPS + LEAST_STEPS


def outliers(durations: list[int]) -> list[int]:
    """Indices of the outliers."""
    watch = OutlierWatch()
    return [index for index, duration in enumerate(durations) if watch.add(duration)]


def test_more_than_three_times_the_median_is_an_outlier() -> None:
    durations = [100] * 60
    durations[40], durations[45], durations[50] = 300, 301, 10_000
    assert outliers(durations) == [45, 50]


def test_the_warm_up_neither_counts_nor_is_judged() -> None:
    durations = [10**9] * WARM_UP_STEPS + [100] * LEAST_STEPS + [301]
    assert outliers(durations) == [FIRST_JUDGED]
    assert outliers([100] * (FIRST_JUDGED - 1) + [10**9]) == []


def test_what_becomes_usual_is_no_outlier_any_more() -> None:
    found = outliers([100] * 100 + [1000] * 1000)
    assert found[0] == 100
    assert len(found) < 150
    assert found[-1] == found[0] + len(found) - 1


@pytest.mark.parametrize("seed", range(5))
def test_ordinary_noise_has_no_outlier(seed: int) -> None:
    rng = random.Random(seed)
    assert outliers([round(1e6 * rng.lognormvariate(0, 0.2)) for _ in range(2000)]) == []
