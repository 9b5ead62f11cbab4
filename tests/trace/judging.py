"""What a diagnosis should say of a planted run, and a table of what was said."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lightning_hpc.trace import Trace
from lightning_hpc.trace.diagnosis import diagnose
from lightning_hpc.trace.stragglers import CAUSES
from tests.trace.real_runs import Plan
from tests.trace.synthetic_runs import JOBS, Slow, shapes_of, simulate

SHARES = (0.15, 0.3, 0.5)
SLOW_PHASES = {"data_prep": "data", "compute": "compute", "optimizer": "compute", "callback": "framework"}
"""Phases in which a rank may be slow, and their causes."""

Confusion = Counter[tuple[str, str]]
"""Counts by what was planted and what was found first."""

_PLACES = {"": "healthy", "growth": "compute", "spikes": "compute", "optimizer": "compute", "forward": "compute"}


def first_answer(traces: Iterable[Trace]) -> str:
    """``data``, ``compute of rank 1``, ``healthy``, …."""
    diagnosis = diagnose(traces)
    if not diagnosis.findings:
        return diagnosis.headline
    first = diagnosis.findings[0]
    return first.dimension if first.rank is None else f"{first.dimension} of rank {first.rank}"


def judge_planted(
    seeds: Iterable[int], shares: Iterable[float] = SHARES, jobs: Iterable[str] = tuple(JOBS)
) -> Confusion:
    """Runs of 20 steps with a bottleneck of each dimension and shape."""
    seeds, shares = list(seeds), list(shares)
    return Counter(
        (dimension, first_answer(simulate(JOBS[name], seed, dimension=dimension, shape=shape, share=share)))
        for name in jobs
        for dimension, shape in shapes_of(JOBS[name])
        for share in shares
        for seed in seeds
    )


def judge_healthy(seeds: Iterable[int]) -> Confusion:
    """Runs of 20 to 200 steps without a bottleneck, of each job by turns."""
    names, lengths = list(JOBS), (20, 50, 200)
    return Counter(
        ("healthy", first_answer(simulate(JOBS[names[seed % len(names)]], seed, steps=lengths[seed // len(names) % 3])))
        for seed in seeds
    )


def judge_stragglers(seeds: Iterable[int], *, every: int = 1, slower: float = 0.1) -> Confusion:
    """Runs of 50 steps in which one rank needs ``slower`` more of a step; it is called rank ``r``."""
    confusion: Confusion = Counter()
    for seed in seeds:
        for job in (job for job in JOBS.values() if job.ranks > 1):
            for phase, cause in SLOW_PHASES.items():
                rank = seed % job.ranks
                traces = simulate(job, seed, steps=50, slow=(Slow(rank, phase, slower, every),))
                confusion[f"{cause} of rank r", first_answer(traces).replace(f"rank {rank}", "rank r")] += 1
    return confusion


def expected_of(plan: Plan) -> str:
    """The right first answer to a real run."""
    dimension = _PLACES.get(plan.place, plan.place)
    return dimension if plan.straggler is None else f"{dimension} of rank {plan.straggler}"


def with_memory(trace: Trace, slept: dict[int, float]) -> Trace:
    """The trace as a memory monitor would have written it, had each sleep been an allocator's retry."""
    retries, records = 0, []
    for record in trace.records:
        retries += record["type"] == "step" and slept.get(record["batch"], 0.0) > 0
        records.append({**record, "memory_retries": retries} if record["type"] == "step" else record)
    return replace(trace, records=tuple(records))


def planted_share(trace: Trace, slept: dict[int, float]) -> float:
    """Part of the time after the warm-up that was slept."""
    steps = trace.steps[3:]
    batches = {step["batch"] for step in steps}
    asleep = 1e3 * sum(each for batch, each in slept.items() if batch in batches)
    return float(asleep / sum(step["total_ms"] for step in steps))


def optimizer_excess(trace: Trace) -> float:
    """What an optimizer takes beyond a third of forward and backward, as part of the time."""
    steps = trace.steps[3:]
    sums: dict[str, Any] = {
        key: sum(step[f"{key}_ms"] for step in steps) for key in ("optimizer", "forward", "backward", "total")
    }
    return float((sums["optimizer"] - (sums["forward"] + sums["backward"]) / 3) / sums["total"])


def right_share(confusion: Confusion) -> float:
    """Part of the answers that were right."""
    return sum(count for (planted, found), count in confusion.items() if planted == found) / confusion.total()


def confusion_table(confusion: Confusion) -> str:
    """Rows are what was planted, columns what was found first."""
    rows = sorted({planted for planted, _ in confusion})
    columns = sorted(
        {found for _, found in confusion}, key=lambda name: (name not in (*rows, *CAUSES, "healthy"), name)
    )
    lines = [f"{'planted':<22}" + "".join(f"{name:>22}" for name in columns)]
    lines += [f"{row:<22}" + "".join(f"{confusion[row, name]:>22}" for name in columns) for row in rows]
    return "\n".join(lines)
