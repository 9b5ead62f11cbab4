import json

import pytest

from lightning_hpc.memory import MemoryReading
from lightning_hpc.precision.switch_policy import SwitchPolicy
from lightning_hpc.precision.unit_bytes import UnitBytes

PATIENCE = 3


def make(**plain: int) -> SwitchPolicy:
    policy = SwitchPolicy(list(plain), high=0.9, low=0.7, patience=PATIENCE)
    policy.learn({name: UnitBytes(each, each // 2, 1) for name, each in plain.items()})
    return policy


def at(*percents: float) -> list[MemoryReading]:
    return [MemoryReading(int(10 * percent), 1000) for percent in percents]


def test_what_saves_most_goes_first_and_only_as_much_as_is_needed() -> None:
    policy = make(a=20, b=100, c=60, d=100)
    switch = policy.decide(at(90))
    assert switch is not None
    assert (switch.units, switch.reason, switch.to_low) == (("b", "d"), "pressure", True)  # from 900 to 800
    assert (switch.bytes, switch.low_count, switch.pressure, switch.limit_bytes) == (100, 2, 0.9, 1000)
    assert policy.decide(at(89)) is None
    again = policy.decide(at(95))
    assert again is not None
    assert again.units == ("c", "a")
    assert not policy.is_exhausted
    assert policy.decide(at(95)) is None
    assert policy.is_exhausted
    assert policy.decide(at(80)) is None
    assert not policy.is_exhausted


def test_the_fullest_rank_decides() -> None:
    policy = make(a=100, b=100)
    readings = [MemoryReading(500, 1000), MemoryReading(950, 1000), MemoryReading(5000, 10_000)]
    switch = policy.decide(readings)
    assert switch is not None
    assert switch.pressure == 0.95
    assert len(switch.units) == 2


def test_units_come_back_one_by_one_in_reverse_after_patience_and_only_if_they_fit() -> None:
    policy = make(a=200, b=180)
    policy.decide(at(95))
    assert policy.lowered == ["a", "b"]
    assert [policy.decide(at(70)) for _ in range(2)] == [None, None]
    assert policy.decide(at(71)) is None  # begins anew
    assert [policy.decide(at(65)) for _ in range(PATIENCE - 1)] == [None] * (PATIENCE - 1)
    switch = policy.decide(at(69))
    assert switch is not None
    assert (switch.reason, switch.units, switch.to_low, switch.bytes) == ("calm", ("b",), False, 90)
    # The highest reading of the quiet time counts: 720 + 100 would be above the middle.
    policy = make(a=200, b=300)
    policy.decide(at(95))
    assert [policy.decide(at(percent)) for percent in (70, 10, 10, 10, 10)] == [None] * 5
    assert policy.lowered == ["b"]


def test_pressure_that_returns_doubles_the_patience() -> None:
    policy = make(a=100)
    checks = []
    for _ in range(4):
        assert policy.decide(at(95)) is not None
        count = 1
        while policy.decide(at(10)) is None:
            count += 1
        checks.append(count)
    assert checks == [PATIENCE, 2 * PATIENCE, 4 * PATIENCE, 8 * PATIENCE]


def test_what_saves_nothing_is_undone_for_good() -> None:
    policy = make(a=1000, b=1000, c=10)
    policy.decide(at(95))
    assert policy.lowered == ["a"]
    switch = policy.learn({"a": UnitBytes(1000, 995, 1, is_measured=True)})
    assert switch is not None
    assert (switch.reason, switch.units, switch.to_low) == ("useless", ("a",), False)
    assert policy.lowered == []
    for _ in range(4):
        policy.decide(at(99))
    assert policy.lowered == ["b", "c"]
    assert policy.learn({"b": UnitBytes(1000, 600, 1, is_measured=True)}) is None


def test_units_that_save_nothing_by_estimate_are_never_lowered() -> None:
    policy = SwitchPolicy(["embedding", "block"], 0.9, 0.7, PATIENCE)
    policy.learn({"embedding": UnitBytes(100, 100, 1), "block": UnitBytes(100, 50, 1)})
    policy.decide(at(99))
    assert policy.lowered == ["block"]


def test_a_failed_allocation_takes_a_quarter_of_what_is_left() -> None:
    policy = make(a=100, b=100, c=100, d=100)
    taken = []
    while (switch := policy.lower_one_level()) is not None:
        assert switch.reason == "out of memory"
        assert switch.pressure is None
        taken.append(len(switch.units))
    assert taken == [1, 1, 1, 1]
    unmeasured = SwitchPolicy([f"unit{index}" for index in range(9)], 0.9, 0.7, PATIENCE)
    taken = []
    while (switch := unmeasured.lower_one_level()) is not None:
        taken.append(len(switch.units))
    assert taken == [3, 2, 1, 1, 1, 1]


def test_its_state_goes_through_json_and_decides_the_same() -> None:
    policy = make(a=100, b=80, c=60)
    for percents in (95, 10, 10, 10, 95, 10, 10):
        policy.decide(at(percents))
    twin = SwitchPolicy(["a", "b", "c"], 0.9, 0.7, PATIENCE)
    twin.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    for percents in (10, 10, 10, 10, 10, 10, 95, 95, 95):
        assert policy.decide(at(percents)) == twin.decide(at(percents))
    assert policy.state_dict() == twin.state_dict()
    with pytest.raises(ValueError, match="c are no units of this model"):
        SwitchPolicy(["a", "b"], 0.9, 0.7, PATIENCE).load_state_dict(policy.state_dict())


def test_a_model_without_units_never_switches() -> None:
    policy = SwitchPolicy([], 0.9, 0.7, PATIENCE)
    assert policy.decide(at(99)) is None
    assert policy.is_exhausted
    assert policy.lower_one_level() is None
