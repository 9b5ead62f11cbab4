"""The iterations of one attempt as arrays: ranks by steps, aligned, without the warm-up."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_hpc.trace.reader import Trace
from lightning_hpc.trace.records import PHASES, Record

Times = NDArray[np.float64]
"""Milliseconds."""

Mask = NDArray[np.bool_]
"""Where something holds."""

WARM_UP_STEPS = 3
"""Left out at the start: what is allocated, compiled, tuned and rebuilt once is over after them (DDP rebuilds its
buckets after the first, `torch.compile` may see new shapes in the second)."""

_SPANS = ("loader_start", "between_epochs")
WRITING = ("checkpoint", "logging")
"""Spans within iterations, or between epochs, in which something is written."""


@dataclass(frozen=True)
class StepTable:
    """Iterations that every rank has recorded.

    Attributes:
        ranks: The ranks that left a file, ascending.
        recorded: Number of common iterations, those of the warm-up included.
        times: By phase, and for ``total``, ``loader_start`` and ``between_epochs``: shape (ranks, steps). The last two
            are spans; they stand at the epoch's first iteration, and ``total`` includes them. Checkpoints and logging
            within an iteration are part of its ``schedule`` and ``total``; ``checkpoint`` and ``logging`` say how
            much they are, with those between epochs. What is unknown is NaN.
        updates: Whether an iteration ended with an optimizer step: shape (steps,).
        records: The iterations' records by rank.
    """

    ranks: tuple[int, ...]
    recorded: int
    times: Mapping[str, Times]
    updates: Mask
    records: tuple[tuple[Record, ...], ...]

    @classmethod
    def align(cls, traces: Sequence[Trace]) -> "StepTable":
        """Aligns the iterations of one attempt by epoch and batch.

        Args:
            traces: One a rank.
        """
        by_rank = {trace.header["rank"]: _usable(trace) for trace in traces}
        ranks = tuple(sorted(by_rank))
        common = sorted(set.intersection(*(set(steps) for steps in by_rank.values())))
        kept = common[WARM_UP_STEPS:]
        records = tuple(tuple(by_rank[rank][key] for key in kept) for rank in ranks)
        times = {name: _array(records, f"{name}_ms") for name in (*PHASES, "total")}
        for name in WRITING:
            writing = np.stack([_writing(trace, name, common)[WARM_UP_STEPS:] for trace in sorted(traces, key=_rank)])
            times["schedule"], times["total"] = times["schedule"] + writing, times["total"] + writing
            times[name] = writing
        spans = {trace.header["rank"]: _spans_by_epoch(trace) for trace in traces}
        for name in _SPANS:
            times[name] = np.zeros_like(times["total"])
            for row, rank in enumerate(ranks):
                for column in _first_of_epochs(kept):
                    times[name][row, column] = spans[rank].get((name, kept[column][0]), 0.0)
                    for each in WRITING if name == "between_epochs" else ():
                        times[each][row, column] += spans[rank].get((each, kept[column][0]), 0.0)
            times["total"] = times["total"] + times[name]
        updates = np.array([any(steps[column]["optimizer_steps"] for steps in records) for column in range(len(kept))])
        return cls(ranks, len(common), times, updates.astype(bool), records)

    @property
    def steps(self) -> int:
        """Number of iterations without the warm-up."""
        return len(self.updates)

    @property
    def knows_comm(self) -> bool:
        """Whether every iteration has its exposed communication."""
        return not bool(np.isnan(self.times["comm"]).any())

    def shared(self, *phases: str) -> Times:
        """What the phases take on every rank, of shape (steps,): the lower median of the ranks.

        A rank that is slow alone does not count; it is `stragglers`' business.
        """
        summed = sum((self.times[phase] for phase in phases), np.zeros_like(self.times["total"]))
        return np.asarray(np.sort(summed, axis=0)[(len(self.ranks) - 1) // 2])

    def unwaited(self, phase: str) -> Times:
        """What is left of a phase without waiting for other ranks, of shape (steps,): who is last waits for nobody."""
        return np.asarray(self.times[phase].min(axis=0))


def _usable(trace: Trace) -> dict[tuple[int, int], Record]:
    return {(step["epoch"], step["batch"]): step for step in trace.steps if step["total_ms"] > 0}


def _array(records: tuple[tuple[Record, ...], ...], key: str) -> Times:
    return np.array([[step[key] for step in steps] for steps in records], dtype=np.float64)  # None becomes NaN


def _first_of_epochs(keys: Sequence[tuple[int, int]]) -> list[int]:
    return [column for column in range(1, len(keys)) if keys[column][0] != keys[column - 1][0]]


def _rank(trace: Trace) -> int:
    return int(trace.header["rank"])


def _writing(trace: Trace, name: str, keys: Sequence[tuple[int, int]]) -> Times:
    """Milliseconds of spans of this name within each of the iterations: shape (keys,)."""
    durations = np.zeros(len(keys))
    steps = trace.steps
    starts = [step["start_ms"] for step in steps]
    columns = {key: column for column, key in enumerate(keys)}
    for span in trace.spans:
        if span["name"] == name and span["parent"] is None and starts:
            step = steps[max(bisect_right(starts, span["start_ms"]) - 1, 0)]
            column = columns.get((step["epoch"], step["batch"]))
            if column is not None:
                durations[column] += span["duration_ms"]
    return durations


def _spans_by_epoch(trace: Trace) -> dict[tuple[str, int], float]:
    """Durations by name and by the epoch that they delay."""
    durations: dict[tuple[str, int], float] = {}
    for span in trace.spans:
        if span["epoch"] is None:
            continue
        if span["name"] in _SPANS:
            key = (span["name"], span["epoch"] + (span["name"] == "between_epochs"))
        elif span["name"] in WRITING and span["parent"] == "between_epochs":
            key = (span["name"], span["epoch"] + 1)
        else:
            continue
        durations[key] = durations.get(key, 0.0) + span["duration_ms"]
    return durations
