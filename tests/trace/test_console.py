from lightning_hpc.trace.console import ConsoleMeans
from lightning_hpc.trace.timeline import Phase


def charged(**times_ms: float) -> list[int]:
    return [round(times_ms.get(phase.name.lower(), 0) * 1e6) for phase in Phase]


def test_the_line_has_the_means() -> None:
    means = ConsoleMeans()
    means.add(charged(data_prep=12, h2d=99, schedule=3, forward=20, backward=30, optimizer=8), 8_000_000)
    means.add(charged(data_prep=12.8, schedule=3.4, forward=20, backward=30, optimizer=8.2), 9_400_000)
    assert means.count == 2
    assert means.line() == "data_prep=12.4ms schedule=3.2ms compute=58.1ms comm=8.7ms"


def test_unknown_communication_is_not_zero() -> None:
    means = ConsoleMeans()
    means.add(charged(data_prep=1), 1_000_000)
    means.add(charged(data_prep=1), None)
    means.add(charged(data_prep=1), 1_000_000)
    assert means.line() == "data_prep=1.0ms schedule=0.0ms compute=0.0ms comm=n/a"
