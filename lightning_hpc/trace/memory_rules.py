"""Rules for memory, from optional keys that a memory monitor adds to step records or writes as records of its own.

=========================== ===========================================================================================
``memory_retries``          Times the allocator had to free its cache and try again, since the start of the attempt.
``memory_oom_retries``      Batches that were run again after out of memory, since the start of the attempt.
``memory_used_bytes``       Most bytes in use since the last record.
``memory_limit_bytes``      Bytes that may be in use.
``memory_hit_rate``         Part of the allocations that the allocator's cache served, 0 to 1.
``memory_fragmentation``    Part of the reserved bytes that is in no use, 0 to 1.
=========================== ===========================================================================================

A record of its own has ``"type": "memory"``, ``epoch``, ``batch`` and ``rank``, and stands for the time up to this
iteration. Each key may be missing or null.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from lightning_hpc.trace.candidate import Candidate
from lightning_hpc.trace.finding import Finding
from lightning_hpc.trace.reader import Trace
from lightning_hpc.trace.records import Record
from lightning_hpc.trace.step_table import Mask, StepTable

MEMORY_KEYS = (
    "memory_retries",
    "memory_oom_retries",
    "memory_used_bytes",
    "memory_limit_bytes",
    "memory_hit_rate",
    "memory_fragmentation",
)
_COUNTERS = ("memory_retries", "memory_oom_retries")
# Less than elsewhere: a retry is counted, not inferred, and none is ordinary.
_LEAST_SHARE = 0.05
# The largest batch of an epoch, or a fragment, is enough to end a run that is this full.
_FULL = 0.95


def knows_memory(traces: Iterable[Trace]) -> bool:
    """Whether there is any figure of memory."""
    return any(record.get(key) is not None for trace in traces for record in trace.records for key in MEMORY_KEYS)


def short_of_memory(table: StepTable, traces: Sequence[Trace]) -> Mask:
    """Where a rank's allocator or batch had to try again: shape (ranks, steps)."""
    by_rank = {trace.header["rank"]: _rises(trace.records) for trace in traces}
    return np.array(
        [
            [(step["epoch"], step["batch"]) in by_rank[rank] for step in steps]
            for rank, steps in zip(table.ranks, table.records, strict=True)
        ],
        dtype=np.bool_,
    ).reshape(len(table.ranks), table.steps)


def retry_rule(table: StepTable, affected: Mask, traces: Sequence[Trace]) -> Candidate | None:
    """Time lost to retries: what the steps with one take longer than the others.

    Args:
        table: The iterations.
        affected: Where a retry happened: shape (steps,).
        traces: Where the figures for the evidence are.
    """
    if not affected.any() or affected.all():
        return None
    # Not the total: where one rank alone is short of memory, the others wait, and it is a straggler.
    step = (
        table.shared("data_prep", "h2d", "forward", "optimizer")
        + table.unwaited("backward")
        + table.unwaited("schedule")
    )
    usual = float(np.median(step[~affected]))
    lost = np.where(affected, step - usual, 0.0)
    counts = {key: max(_values(traces, key), default=0) for key in _COUNTERS}
    evidence = (
        f"{affected.sum()} of {table.steps} steps had to try again for memory and took"
        f" {step[affected].mean():.3g} ms, the others {usual:.3g} ms ({counts[_COUNTERS[0]]} allocator retries,"
        f" {counts[_COUNTERS[1]]} batches run again)"
    )
    evidence += "".join(
        f", {name} {_values(traces, key)[-1]:.0%}"
        for name, key in (("cache hits", "memory_hit_rate"), ("fragmentation", "memory_fragmentation"))
        if _values(traces, key)
    )
    return Candidate("memory", lost, evidence, _LESS_MEMORY, _LEAST_SHARE)


def pressure(traces: Sequence[Trace]) -> Finding | None:
    """The risk that the next batch does not fit. Its share is 0: it has cost no time yet."""
    worst, rank = max(((_fill(trace.records), trace.header["rank"]) for trace in traces), default=(0.0, 0))
    if worst < _FULL:
        return None
    return Finding("memory", 0.0, f"rank {rank} had {worst:.1%} of its memory in use", 1.0, _LESS_MEMORY)


def _rises(records: Iterable[Record]) -> set[tuple[int, int]]:
    """Iterations, as (epoch, batch), at which a counter was higher than before."""
    highest = dict.fromkeys(_COUNTERS, 0)
    rises = set()
    for record in records:
        for key in _COUNTERS:
            count = record.get(key) or 0
            if count > highest[key]:
                highest[key] = count
                rises.add((record["epoch"], record["batch"]))
    return rises


def _values(traces: Sequence[Trace], key: str) -> list[float]:
    return [record[key] for trace in traces for record in trace.records if record.get(key) is not None]


def _fill(records: Iterable[Record]) -> float:
    limited = [record for record in records if record.get("memory_limit_bytes") and record.get("memory_used_bytes")]
    return max((record["memory_used_bytes"] / record["memory_limit_bytes"] for record in limited), default=0.0)


_LESS_MEMORY = (
    'a smaller batch with accumulate_grad_batches; then precision="bf16-mixed" or MemoryAwarePrecision; then activation'
    " checkpointing; for fragments PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
