"""How fast messages travel at one level of a topology."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkSpeed:
    """Latency and bandwidth of one transfer that has the link to itself.

    Attributes:
        latency_seconds: Time that an empty message takes, one way.
        bytes_per_second: Payload, without headers: TCP over Ethernet at an MTU of 1500 carries 1/1.046 of the link's
            nominal rate. Ranks of a domain that send outwards at once share this figure.

    Raises:
        ValueError: If a figure is not a positive number.
    """

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "bytes_per_second"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} of a link must be a positive number")

    def seconds(self, num_bytes: float) -> float:
        """Time that a message of ``num_bytes`` takes, one way."""
        return self.latency_seconds + num_bytes / self.bytes_per_second

    def __str__(self) -> str:
        return f"{format_bytes_per_second(self.bytes_per_second)}, {format_seconds(self.latency_seconds)}"


def format_bytes_per_second(value: float) -> str:
    """A rate as people say it: ``"23.9 MB/s"``, three digits."""
    return _with_prefix(value, "B/s")


def format_bits_per_second(value: float) -> str:
    """The same rate in bytes per second as networks are labelled: ``"191 Mbit/s"``."""
    return _with_prefix(8 * value, "bit/s")


def format_seconds(value: float) -> str:
    """A duration as people say it: ``"52.1 µs"``, three digits."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= factor:
            return f"{three_digits(value / factor)} {unit}"
    return f"{three_digits(value / 1e-9)} ns"


def three_digits(value: float) -> str:
    """A number with at least three digits: ``"5.98"``, ``"23.9"``, ``"478"``, ``"9120"``."""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}"


def _with_prefix(value: float, unit: str) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{three_digits(value / factor)} {prefix}{unit}"
    return f"{three_digits(value)} {unit}"
