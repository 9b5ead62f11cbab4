import pytest

from lightning_hpc.report.axis import Axis


@pytest.mark.parametrize(
    ("top", "ticks"),
    [(1.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)), (7.6, (0, 2, 4, 6, 8)), (0.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0))],
)
def test_a_linear_axis_begins_at_zero_and_ends_beyond_the_largest_value(top: float, ticks: tuple[float, ...]) -> None:
    axis = Axis.linear([0.0, top])
    assert axis.ticks == pytest.approx(ticks)
    assert axis.share(ticks[-1]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [([0.3, 4.0], (0.2, 0.5, 1, 2, 5)), ([1.0], (1, 2)), ([1e-9, 2e-9], (1e-9, 2e-9)), ([9.0, 11.0], (5, 10, 20))],
)
def test_a_logarithmic_axis_has_1_2_and_5(values: list[float], ticks: tuple[float, ...]) -> None:
    axis = Axis.logarithmic(values)
    assert axis.ticks == pytest.approx(ticks)
    assert all(-1e-9 <= axis.share(value) <= 1 + 1e-9 for value in values)


def test_equal_ratios_are_equal_distances() -> None:
    axis = Axis.logarithmic([1.0, 10.0])
    assert axis.share(2.0) - axis.share(1.0) == pytest.approx(axis.share(10.0) - axis.share(5.0))
