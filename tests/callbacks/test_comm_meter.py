from types import SimpleNamespace

import pytest

from lightning_hpc.callbacks.comm_meter import CommMeter
from lightning_hpc.comm.stats import CommStats, Decision


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


def test_each_decision_is_taken_once() -> None:
    stats = CommStats()
    meter = CommMeter(SimpleNamespace(comm_stats=stats), world_size=2)
    assert list(meter.take_decisions()) == []
    decision = Decision(step=14, choice="int4", reason="it is fast", predicted={"int4": 0.1}, measured={"int4": 0.2})
    stats.decisions.append(decision)
    assert list(meter.take_decisions()) == [decision]
    assert list(meter.take_decisions()) == []
