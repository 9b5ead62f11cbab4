"""Which rank is slow, and by what; the ranks that wait for it are not blamed.

Ranks that reduce gradients take the same time for a step: who is slow works longer, and the others wait as much longer,
in communication or, since Lightning exchanges a flag before every fetch, in ``schedule``. So a rank is judged by its
*own work*, the phases in which nobody waits for others. ``schedule`` is both. A rank's excess of it is its own work as
far as the others wait longer for gradients at the same time, and more of other work on this rank does not explain that.

What a straggler costs is asked of each step: the longest own work of all ranks, less the longest once the phase in
question takes the median of the other ranks. The largest is taken, repaired, and the question asked again, so that a
straggler hidden behind a slower one is found, and their costs add up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lightning_hpc.trace.resampling import is_positive, share_confidence
from lightning_hpc.trace.step_table import Mask, StepTable, Times

CAUSES = ("data", "compute", "memory", "framework")
"""What a rank may be slow by."""

LEAST_EXCESS = 0.05
"""A straggler does so much more own work than the others; half of what has to be found."""

LEAST_STEPS = 30
"""Iterations without the warm-up. In fewer, equal ranks are told apart by chance too often."""

# Of framework where communication is not measured: a wait for the flag may be in it, on a busy machine a long one.
_LEAST_UNSURE_EXCESS = 0.15
_LEAST_SHARE = 0.015
_LEAST_CONFIDENCE = 0.9
# That Student's test calls one rank of equal ones slow, all pairs of rank and cause together; the excess itself and its
# confidence are asked for besides.
_CHANCE = 0.03
# Steps that stand out: by a quarter of the usual work, and beyond the rank's own variation.
_BURST = 0.25
_BURST_DEVIATIONS = 5.0
_LEAST_BURSTS = 4
_MOST_STRAGGLERS = 8
# Milliseconds that Lightning's flag may take from rank 0 to another one that has to be woken up for it: 0.1 to 0.4 were
# seen with plain DDP on two busy processors. Where communication is not measured, that looks like work of the receiver.
_FLAG_MS = 0.5


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        rank: Which.
        cause: One of `CAUSES`.
        phase: The phase that accounts for most of it.
        own_ms: Mean milliseconds of the cause in a step of this rank.
        others_ms: The same for the median of the other ranks.
        step_ms: Mean milliseconds of a step, the stragglers named before this one repaired.
        repaired_ms: The same, had this rank's cause taken as long as on the median of the others.
        slow_steps: Part of the steps in which the rank was slower than `LEAST_EXCESS` allows, 0 to 1.
        share: Part of the training time lost to it, 0 to 1.
        confidence: Part of the resampled runs in which its excess is `LEAST_EXCESS` or more (three times that for
            framework where communication is not measured), 0 to 1.
    """

    rank: int
    cause: str
    phase: str
    own_ms: float
    others_ms: float
    step_ms: float
    repaired_ms: float
    slow_steps: float
    share: float
    confidence: float


def find_stragglers(table: StepTable, short_of_memory: Mask | None = None) -> tuple[Straggler, ...]:
    """Finds slow ranks, the most costly first.

    Args:
        table: The iterations of all ranks.
        short_of_memory: Where a rank's allocator or batch had to try again: shape (ranks, steps).
    """
    if len(table.ranks) < 2 or table.steps < LEAST_STEPS:
        return ()
    work = _own_work(table, short_of_memory)
    excess = {cause: times - _median_of_others(times) for cause, times in work.items()}
    total = np.asarray(table.times["total"].mean(axis=0))
    step_ms = float(total.mean())
    found: list[Straggler] = []
    while len(found) < _MOST_STRAGGLERS:
        straggler = _most_costly(table, work, excess, total)
        if straggler is None:
            break
        found.append(replace(straggler, step_ms=step_ms, repaired_ms=step_ms - straggler.share * float(total.mean())))
        step_ms = found[-1].repaired_ms
        row = table.ranks.index(straggler.rank)
        work[straggler.cause][row] -= excess[straggler.cause][row]
        excess[straggler.cause][row] = 0.0
    return tuple(found)


def waiting_share(table: StepTable, found: tuple[Straggler, ...]) -> float:
    """Part of the time that ranks wait for others with the stragglers repaired: they are slow in turns."""
    if len(table.ranks) < 2:
        return 0.0
    work = sum(_own_work(table, None).values(), np.zeros_like(table.times["total"]))
    lost = work.max(axis=0) - np.median(work, axis=0)
    return max(float(lost.sum() / table.times["total"].mean(axis=0).sum()) - sum(each.share for each in found), 0.0)


def _own_work(table: StepTable, short_of_memory: Mask | None) -> dict[str, Times]:
    """By cause, of shape (ranks, steps)."""
    times = table.times
    data = times["data_prep"] + times["h2d"] + times["loader_start"]
    # Without a measured communication, the wait for gradients is somewhere in backward.
    before_gradients = times["forward"] + times["backward"] if table.knows_comm else times["forward"]
    compute = before_gradients + times["optimizer"]
    memory = np.zeros_like(compute)
    if short_of_memory is not None and short_of_memory.any():
        memory = np.where(short_of_memory, compute - _median_of_others(compute), 0.0)
    waits = times["comm"] if table.knows_comm else times["backward"]
    flag = np.zeros((len(table.ranks), 1))
    if not table.knows_comm:
        flag[[rank != 0 for rank in table.ranks]] = _FLAG_MS
    framework = _own_schedule(times["schedule"], waits, data + before_gradients, times["optimizer"], flag)
    return {"data": data, "compute": compute - memory, "memory": memory, "framework": framework}


def _own_schedule(schedule: Times, waits: Times, before_gradients: Times, optimizer: Times, flag: Times) -> Times:
    usual = _median_of_others(schedule)
    missed = _median_of_others(waits) - waits
    # What a hook at the end of a step delays, the others feel in the next one.
    missed = np.maximum(missed, np.concatenate([missed[:, 1:], missed[:, -1:]], axis=1))
    explained = np.maximum(before_gradients - _median_of_others(before_gradients), 0.0)
    # The flag comes when the slowest optimizer is done.
    waits_for_flag = optimizer.max(axis=0) - optimizer + flag
    own = np.clip(missed - explained, 0.0, np.maximum(schedule - usual - waits_for_flag, 0.0))
    return np.asarray(schedule.min(axis=0) + own)


def _median_of_others(times: Times) -> Times:
    """For each rank and step the median of the other ranks: shape (ranks, steps)."""
    ordered = np.sort(times, axis=0)
    last = len(times) - 1

    def without_self(place: int) -> Times:
        """What stands at a place of the ordered others: one further where a rank itself stands before it."""
        return np.asarray(np.where(times <= ordered[place], ordered[place + 1], ordered[place]))

    return np.asarray((without_self((last - 1) // 2) + without_self(last // 2)) / 2)


def _most_costly(
    table: StepTable, work: Mapping[str, Times], excess: Mapping[str, Times], total: Times
) -> Straggler | None:
    own = sum(work.values(), np.zeros_like(table.times["total"]))
    longest = own.max(axis=0)
    ordered = np.sort(own, axis=0)
    usual = np.asarray(np.median(own, axis=0))
    best: tuple[float, int, str, float] | None = None
    for cause, extra in excess.items():
        for row in range(len(table.ranks)):
            least = LEAST_EXCESS if table.knows_comm or cause != "framework" else _LEAST_UNSURE_EXCESS
            confidence = _confidence(extra[row], usual, least, pairs=len(table.ranks) * len(excess))
            if confidence < _LEAST_CONFIDENCE:
                continue
            others = np.where(own[row] == longest, ordered[-2], longest)
            share = float((longest - np.maximum(others, own[row] - extra[row])).sum() / total.sum())
            if share >= _LEAST_SHARE and (best is None or share > best[0]):
                best = share, row, cause, confidence
    return None if best is None else _describe(table, work, excess, usual, *best)


def _confidence(extra: Times, usual: Times, least: float, pairs: int) -> float:
    """That a rank is slow, 0 to 1."""
    if extra.sum() < least * usual.sum():
        return 0.0
    if not (is_positive(extra, _CHANCE / pairs) or _is_slow_at_times(extra, usual)):
        return 0.0
    return share_confidence(extra, usual, least)


def _is_slow_at_times(extra: Times, usual: Times) -> bool:
    """Whether a few steps stand out, and not at the start only. They widen what Student's test takes for chance."""
    deviation = 1.4826 * float(np.median(np.abs(extra - np.median(extra))))
    stands_out = extra > np.maximum(_BURST * usual, _BURST_DEVIATIONS * deviation)
    return bool(stands_out.sum() >= _LEAST_BURSTS and stands_out[len(extra) // 2 :].any())


def _describe(
    table: StepTable,
    work: Mapping[str, Times],
    excess: Mapping[str, Times],
    usual: Times,
    share: float,
    row: int,
    cause: str,
    confidence: float,
) -> Straggler:
    own, extra = work[cause][row], excess[cause][row]
    if cause == "memory":  # it is kept as an excess; the figures shown are those of the computation that holds it
        own = own + work["compute"][row]
    return Straggler(
        rank=table.ranks[row],
        cause=cause,
        phase=_main_phase(table, row, cause),
        own_ms=float(own.mean()),
        others_ms=float((own - extra).mean()),
        step_ms=0.0,
        repaired_ms=0.0,
        slow_steps=float(np.mean(extra > LEAST_EXCESS * usual)),
        share=share,
        confidence=confidence,
    )


def _main_phase(table: StepTable, row: int, cause: str) -> str:
    phases = {"data": ("data_prep", "h2d", "loader_start"), "framework": ("schedule",)}.get(
        cause, ("forward", "backward", "optimizer") if table.knows_comm else ("forward", "optimizer")
    )
    extra = {phase: float((table.times[phase] - _median_of_others(table.times[phase]))[row].sum()) for phase in phases}
    return max(extra, key=lambda phase: extra[phase])
