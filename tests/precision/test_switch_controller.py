import pytest

from tests.precision.random_switching import run_sequence


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_random_pressure_leaves_all_ranks_with_the_same_map(first: int) -> None:
    reasons = {switch.reason for seed in range(first, first + 50) for switch in run_sequence(seed)}
    assert reasons == {"pressure", "calm", "useless"}
