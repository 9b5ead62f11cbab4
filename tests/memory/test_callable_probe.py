import pytest

from lightning_hpc.memory import CallableProbe, MemoryReading


def test_the_function_is_asked_at_each_reading() -> None:
    readings = iter([MemoryReading(1, 4), MemoryReading(2, 4)])
    probe = CallableProbe(lambda: next(readings))
    assert [probe.read().pressure, probe.read().pressure] == [0.25, 0.5]


def test_a_function_that_returns_something_else_is_named() -> None:
    with pytest.raises(TypeError, match=r"<lambda>.* returned 0\.9; a probe returns MemoryReading"):
        CallableProbe(lambda: 0.9).read()  # type: ignore[arg-type, return-value]
