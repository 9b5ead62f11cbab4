import pytest

from lightning_hpc.memory import BudgetProbe, CallableProbe, MemoryReading


def test_the_budget_takes_the_place_of_the_limit() -> None:
    probe = BudgetProbe(CallableProbe(lambda: MemoryReading(300, 1000)), budget_bytes=200)
    assert probe.read() == MemoryReading(300, 200)
    assert probe.read().pressure == 1.5


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="budget_bytes=0 leaves no memory"):
        BudgetProbe(CallableProbe(lambda: MemoryReading(300, 1000)), budget_bytes=0)
