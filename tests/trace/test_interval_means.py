import pytest

from lightning_hpc.trace.interval_means import IntervalMeans
from lightning_hpc.trace.timeline import Phase


def charged(**times_ms: float) -> list[int]:
    return [round(times_ms.get(phase.name.lower(), 0) * 1e6) for phase in Phase]


def test_the_line_has_the_means() -> None:
    means = IntervalMeans()
    means.add(
        charged(data_prep=12, h2d=99, schedule=3, forward=20, backward=30, optimizer=8), 8_000_000, 200_000_000, 16
    )
    means.add(charged(data_prep=12.8, schedule=3.4, forward=20, backward=30, optimizer=8.2), 9_400_000, 100_000_000, 16)
    assert means.count == 2
    assert means.line() == "data_prep=12.4ms schedule=3.2ms compute=58.1ms comm=8.7ms"
    assert means.metrics() == pytest.approx(
        {
            "data_prep_ms": 12.4,
            "h2d_ms": 49.5,
            "schedule_ms": 3.2,
            "forward_ms": 20,
            "backward_ms": 30,
            "optimizer_ms": 8.1,
            "comm_ms": 8.7,
            "total_ms": 150,
            "samples_per_second": 32 / 0.3,
        }
    )


def test_unknown_communication_is_not_zero() -> None:
    means = IntervalMeans()
    means.add(charged(data_prep=1), 1_000_000, 1, 8)
    means.add(charged(data_prep=1), None, 1, None)
    means.add(charged(data_prep=1), 1_000_000, 1, 8)
    assert means.line() == "data_prep=1.0ms schedule=0.0ms compute=0.0ms comm=n/a"
    assert not {"comm_ms", "samples_per_second"} & means.metrics().keys()
