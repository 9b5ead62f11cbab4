import numpy as np
import pytest

from lightning_hpc.trace.resampling import is_positive, resample, share_confidence


@pytest.mark.parametrize("steps", [50, 200, 5000])
def test_shares_scatter_round_that_of_the_run(steps: int) -> None:
    rng = np.random.default_rng(0)
    part, whole = rng.exponential(size=steps), np.full(steps, 4.0)
    shares = resample(part, whole)
    assert shares.mean() == pytest.approx(part.sum() / whole.sum(), rel=0.05)
    assert shares.std() == pytest.approx(0.25 / np.sqrt(steps), rel=0.5)


def test_a_constant_share_is_certain_and_a_single_event_is_not() -> None:
    whole = np.ones(17)
    assert share_confidence(0.2 * whole, whole, 0.1) == 1.0
    assert share_confidence(0.05 * whole, whole, 0.1) == 0.0
    for step in range(17):
        event = np.zeros(17)
        event[step] = 17.0
        assert 0.5 < share_confidence(event, whole, 0.1) < 0.75


def test_neighbours_that_resemble_each_other_make_less_sure() -> None:
    fresh, whole = np.tile([0.0, 0.3], 50), np.ones(100)
    assert resample(np.sort(fresh), whole).std() > 2 * resample(fresh, whole).std()


def test_chance_is_called_positive_as_seldom_as_asked_for() -> None:
    rng = np.random.default_rng(1)
    called = sum(is_positive(rng.normal(size=47), 0.01) for _ in range(3000))
    assert called < 60
    assert is_positive(rng.normal(size=47) + 2, 0.001)
    assert not is_positive(np.ones(1), 0.01)
