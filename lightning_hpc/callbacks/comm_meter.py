"""Reads from a strategy what communication an iteration has cost, and what was decided about it."""

from collections.abc import Sequence
from typing import Protocol

from lightning.pytorch.strategies import Strategy

from lightning_hpc.comm.stats import Decision


class _CommStats(Protocol):
    """The part of `CommStats` that is read here; a user's own strategy may publish the same."""

    exposed_seconds: float

    @property
    def bytes_sent(self) -> dict[str, int]: ...


class CommMeter:
    """Differences of a strategy's ``comm_stats``, whose figures only ever grow, between one reading and the next.

    Without ``comm_stats``, as with Lightning's own strategies, communication is unknown with several ranks, and nothing
    with one.

    Args:
        strategy: The Trainer's strategy, ready to train: some make new ``comm_stats`` for each fit.
        world_size: Number of ranks.
    """

    def __init__(self, strategy: Strategy, world_size: int) -> None:
        self._stats: _CommStats | None = getattr(strategy, "comm_stats", None)
        self._without_stats = (None, None) if world_size > 1 else (0, 0)
        self._exposed_ns = self._bytes_sent = self._taken = 0
        self._decisions: Sequence[Decision] = getattr(self._stats, "decisions", ())
        self.read()

    def read(self) -> tuple[int | None, int | None]:
        """Nanoseconds of exposed communication and bytes sent since the last reading; None where unknown."""
        if self._stats is None:
            return self._without_stats
        exposed_before, self._exposed_ns = self._exposed_ns, round(self._stats.exposed_seconds * 1e9)
        bytes_before, self._bytes_sent = self._bytes_sent, sum(self._stats.bytes_sent.values())
        return self._exposed_ns - exposed_before, self._bytes_sent - bytes_before

    def take_decisions(self) -> Sequence[Decision]:
        """What was decided since the last call."""
        before, self._taken = self._taken, len(self._decisions)
        return self._decisions[before:] if self._taken > before else ()
