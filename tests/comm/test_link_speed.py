from typing import Any

import pytest

from lightning_hpc.comm.link_speed import LinkSpeed, format_bytes_per_second, format_seconds


def test_a_message_takes_the_latency_and_its_bytes() -> None:
    assert LinkSpeed(1e-3, 1e6).seconds(500) == pytest.approx(1.5e-3)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "fast", None, True])
@pytest.mark.parametrize("name", ["latency_seconds", "bytes_per_second"])
def test_a_figure_that_is_not_positive_is_quoted(name: str, value: Any) -> None:
    figures = {"latency_seconds": 1.0, "bytes_per_second": 1.0, name: value}
    with pytest.raises(ValueError, match=name) as error:
        LinkSpeed(**figures)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("value", "text"), [(23.94e6, "23.9 MB/s"), (9.1e9, "9.10 GB/s"), (478e6, "478 MB/s"), (12.0, "12.0 B/s")]
)
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert format_bytes_per_second(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(52.14e-6, "52.1 µs"), (2.0, "2.00 s"), (0.1, "100 ms"), (5e-9, "5.00 ns")]
)
def test_durations_have_three_digits(value: float, text: str) -> None:
    assert format_seconds(value) == text
