"""What ``lightning-hpc bench comm`` has measured, summed up."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_hpc.comm.collectives import ring_bytes
from lightning_hpc.commands.timed_fit import TimedFit

PEER = "ddp"
"""What the others are compared with."""

Rounds = Mapping[str, Sequence[Sequence[TimedFit]]]
"""For each strategy, the fits of all ranks in each round."""


@dataclass(frozen=True)
class CommResult:
    """One strategy.

    Attributes:
        strategy: ``"ddp"``, ``"none"`` for the exact hierarchy, a codec, or ``"auto"``.
        choice: What ``"auto"`` has chosen in each round; empty for others.
        step_seconds: Median over all timed steps.
        round_medians: Median of each round, in seconds.
        speedup: Median step of plain DDP divided by this one's, or None without DDP.
        speedup_range: The smallest and largest ratio of the medians of two rounds; None for DDP itself.
        sent_bytes: Payload in a step by level, of the rank that sends most there.
        exposed_share: What of the time of all timed steps, on all ranks, is spent waiting for communication; None where
            nobody measures it.
        predicted_seconds: By the cost model, from what the fastest strategy computes; None where it says nothing.
        prediction_error: Predicted by measured step time, less one.
    """

    strategy: str
    choice: tuple[str, ...]
    step_seconds: float
    round_medians: tuple[float, ...]
    speedup: float | None
    speedup_range: tuple[float, float] | None
    sent_bytes: dict[str, float]
    exposed_share: float | None
    predicted_seconds: float | None
    prediction_error: float | None


def summarize(rounds: Rounds, world_size: int) -> list[CommResult]:
    """Sums the fits of all strategies up; those without any are left out.

    Args:
        rounds: The fits. Ranks keep step with each other, so rank 0's clock counts.
        world_size: Number of ranks.
    """
    predicted = _median_predictions(rounds)
    return [_summarize(name, rounds, predicted, world_size) for name, fits in rounds.items() if fits]


def _summarize(name: str, rounds: Rounds, predicted: Mapping[str, float], world_size: int) -> CommResult:
    medians, median = _medians(rounds[name])
    peers, peer = _medians(rounds[PEER]) if rounds.get(PEER) else ((), None)
    choice = tuple(dict.fromkeys(fits[0].choice for fits in rounds[name] if fits[0].choice))
    expected = predicted.get(choice[-1] if choice else name)
    return CommResult(
        strategy=name,
        choice=choice,
        step_seconds=median,
        round_medians=medians,
        speedup=peer / median if peer is not None else None,
        speedup_range=(min(peers) / max(medians), max(peers) / min(medians)) if peers and name != PEER else None,
        sent_bytes=_sent(name, rounds[name][-1], world_size),
        exposed_share=_exposed_share(itertools.chain(*rounds[name])),
        predicted_seconds=expected,
        prediction_error=expected / median - 1 if expected is not None else None,
    )


def _medians(fits: Sequence[Sequence[TimedFit]]) -> tuple[tuple[float, ...], float]:
    """Of each round, and of all steps."""
    steps = [ranks[0].step_seconds for ranks in fits]
    return tuple(statistics.median(seconds) for seconds in steps), statistics.median(itertools.chain(*steps))


def _exposed_share(fits: Iterable[TimedFit]) -> float | None:
    """Means by means: the mean wait may be longer than the median step, which slow steps hardly move."""
    measured = [(fit.exposed_seconds, fit.step_seconds) for fit in fits if fit.exposed_seconds is not None]
    steps = sum(statistics.mean(seconds) for _, seconds in measured)
    return sum(exposed for exposed, _ in measured) / steps if measured else None


def _median_predictions(rounds: Rounds) -> dict[str, float]:
    """What the fits of the fastest strategy predict.

    There the computation is least held up by communication, while the host is as busy with it as it will be.
    """
    observed = [fits for fits in rounds.values() if fits and fits[0][0].predicted]
    if not observed:
        return {}
    fastest = min(
        observed, key=lambda fits: statistics.median(statistics.median(ranks[0].step_seconds) for ranks in fits)
    )
    names = fastest[0][0].predicted
    return {name: statistics.median(ranks[0].predicted[name] for ranks in fastest) for name in names}


def _sent(name: str, ranks: Sequence[TimedFit], world_size: int) -> dict[str, float]:
    if name == PEER:  # nobody counts, and all know: a ring
        return {"all_ranks": float(ring_bytes(4 * ranks[0].gradients, world_size))}
    levels = dict.fromkeys(level for fit in ranks for level in fit.sent_bytes)
    return {level: max(fit.sent_bytes.get(level, 0.0) for fit in ranks) for level in levels}
