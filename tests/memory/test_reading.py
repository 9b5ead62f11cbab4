import pytest

from lightning_hpc.memory import MemoryReading


def test_pressure_is_the_part_in_use() -> None:
    assert MemoryReading(3, 4).pressure == 0.75
    assert MemoryReading(6, 4).pressure == 1.5


@pytest.mark.parametrize(
    ("used", "limit", "message"), [(-1, 4, "used_bytes=-1 is negative"), (1, 0, "limit_bytes=0 leaves no memory")]
)
def test_impossible_figures_are_refused(used: int, limit: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemoryReading(used, limit)
