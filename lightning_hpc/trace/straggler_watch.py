"""Follows stragglers from window to window: what is new of them, and what they have cost."""

from dataclasses import dataclass
from typing import Literal

from lightning_hpc.trace.stragglers import Straggler

# A rank whose excess is near what counts as slow is found in some windows and not in others.
_MISSED_WHEN_GONE = 2
# Shares of windows of a hundred steps differ by chance; both are asked for.
_CHANGE_FACTOR, _CHANGE_SHARE = 1.5, 0.03


@dataclass(frozen=True)
class StragglerNews:
    """Something about a straggler that has not been said yet.

    Attributes:
        change: What happened.
        straggler: Its figures, those of the last window in which it was found.
    """

    change: Literal["appeared", "changed", "gone"]
    straggler: Straggler

    def __str__(self) -> str:
        who = f"rank {self.straggler.rank}"
        if self.change == "gone":
            return f"{who} is no longer slow by {self.straggler.cause}"
        still = "is" if self.change == "appeared" else "is still"
        excess = self.straggler.own_ms - self.straggler.others_ms
        return (
            f"{who} {still} slow by {self.straggler.cause} ({self.straggler.phase}): {excess:.3g} ms a step more than"
            f" the others, which costs {self.straggler.share:.1%} of the time (without that a step would take"
            f" {self.straggler.repaired_ms:.3g} ms, not {self.straggler.step_ms:.3g} ms)"
        )


@dataclass
class _Known:
    told: Straggler
    last: Straggler
    missed: int = 0


class StragglerWatch:
    """Compares each window with those before.

    Attributes:
        steps: Iterations seen.
        total_ms: Milliseconds that they took.
        lost_ms: Milliseconds of these that stragglers have cost, by rank and cause.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.total_ms = 0.0
        self.lost_ms: dict[tuple[int, str], float] = {}
        self._known: dict[tuple[int, str], _Known] = {}

    def update(self, found: tuple[Straggler, ...], steps: int, total_ms: float) -> list[StragglerNews]:
        """Takes a window.

        Args:
            found: Its stragglers.
            steps: Its iterations.
            total_ms: Milliseconds that they took.

        Returns:
            What is new: a straggler appeared, costs much more or less than was told last, or was not found in two
            windows in a row.
        """
        self.steps += steps
        self.total_ms += total_ms
        news = []
        for straggler in found:
            key = (straggler.rank, straggler.cause)
            self.lost_ms[key] = self.lost_ms.get(key, 0.0) + straggler.share * total_ms
            news += self._meet(key, straggler)
        return news + self._miss({(straggler.rank, straggler.cause) for straggler in found})

    def summary(self) -> str:
        """A sentence with the costs, the largest first."""
        watched = f"{self.total_ms / 1e3:.1f} s in {self.steps} steps"
        if not self.lost_ms:
            return f"no rank was slow alone in {watched}"
        lost = sum(self.lost_ms.values())
        parts = ", ".join(
            f"rank {rank} by {cause} {milliseconds / 1e3:.1f} s"
            for (rank, cause), milliseconds in sorted(self.lost_ms.items(), key=lambda item: -item[1])
        )
        return f"slow ranks cost {lost / 1e3:.1f} s ({lost / self.total_ms:.1%}) of {watched}: {parts}"

    def _meet(self, key: tuple[int, str], straggler: Straggler) -> list[StragglerNews]:
        known = self._known.get(key)
        if known is None:
            self._known[key] = _Known(straggler, straggler)
            return [StragglerNews("appeared", straggler)]
        known.last, known.missed = straggler, 0
        if not _differ(known.told.share, straggler.share):
            return []
        known.told = straggler
        return [StragglerNews("changed", straggler)]

    def _miss(self, found: set[tuple[int, str]]) -> list[StragglerNews]:
        gone = []
        for key, known in list(self._known.items()):
            known.missed += key not in found
            if known.missed >= _MISSED_WHEN_GONE:
                gone.append(StragglerNews("gone", self._known.pop(key).last))
        return gone


def _differ(told: float, share: float) -> bool:
    small, large = sorted((told, share))
    return large > _CHANGE_FACTOR * small and large - small > _CHANGE_SHARE
