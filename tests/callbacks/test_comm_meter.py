from types import SimpleNamespace

import pytest

from lightning_hpc.callbacks.comm_meter import CommMeter


def test_differences_between_readings() -> None:
    stats = SimpleNamespace(exposed_seconds=1.5, bytes_sent={"node": 10, "rack": 5})
    meter = CommMeter(SimpleNamespace(comm_stats=stats), world_size=2)
    assert meter.read() == (0, 0)
    stats.exposed_seconds = 1.75
    stats.bytes_sent = {"node": 110, "rack": 6}
    assert meter.read() == (250_000_000, 101)
    assert meter.read() == (0, 0)


@pytest.mark.parametrize(("world_size", "expected"), [(1, (0, 0)), (2, (None, None))])
def test_without_stats_several_ranks_are_unknown(world_size: int, expected: tuple[int | None, int | None]) -> None:
    assert CommMeter(SimpleNamespace(), world_size).read() == expected
