"""Names the bottleneck of a run from its records, with its share, its evidence and what to try first."""

from collections.abc import Iterable, Sequence

import numpy as np

from lightning_hpc.trace.candidate import Candidate, share_of, whole
from lightning_hpc.trace.compute_rules import compute_rules
from lightning_hpc.trace.finding import Diagnosis, Finding
from lightning_hpc.trace.memory_rules import knows_memory, pressure, retry_rule, short_of_memory
from lightning_hpc.trace.reader import Trace
from lightning_hpc.trace.resampling import share_confidence
from lightning_hpc.trace.step_table import Mask, StepTable
from lightning_hpc.trace.stragglers import Straggler, find_stragglers, waiting_share
from lightning_hpc.trace.waiting_rules import communication_rule, data_rule, framework_rule

LEAST_STEPS = 20
"""Fewer common iterations, those of the warm-up included, are not enough to tell."""

# A single disturbed step is in 63 to 67 % of the resampled runs, and must not be a finding.
_LEAST_CONFIDENCE = 0.75
# Two equal ranks whose steps vary by 15 % wait for each other for a tenth of the time; eight of them for a fifth.
_MUCH_WAITING = 0.2
# Steps over so many times the median are stalls, worth a note if they take this part of the time.
_STALLED = 5
_MUCH_STALLING = 0.05


def diagnose(traces: Iterable[Trace]) -> Diagnosis:
    """Diagnoses the last attempt of a run.

    Args:
        traces: Of one run, as `read_traces` gives them: one a rank and attempt.

    Raises:
        ValueError: If there is no iteration among them, which is no sign of health, or if two traces are of the same
            rank and attempt.
    """
    attempts = _by_attempt(traces)
    if not attempts:
        raise ValueError(
            "no trace holds an iteration, so there is nothing to diagnose; give those of a run that has trained"
        )
    last = attempts[max(attempts)]
    table = StepTable.align(last)
    world_size = max(trace.header["world_size"] for trace in last)
    notes = _notes(attempts, table, last, world_size)
    if table.recorded < LEAST_STEPS:
        headline = f"not enough samples ({table.recorded} of {LEAST_STEPS} steps)"
        return Diagnosis(headline, (), tuple(notes), table.recorded, len(table.ranks), is_healthy=False)
    findings, doubts = _find(table, last, world_size)
    doubts += _stalls(table)
    headline = _sentence(findings[0]) if findings else "healthy"
    return Diagnosis(
        headline, tuple(findings), (*notes, *doubts), table.recorded, len(table.ranks), is_healthy=not findings
    )


def _by_attempt(traces: Iterable[Trace]) -> dict[int, list[Trace]]:
    attempts: dict[int, list[Trace]] = {}
    for trace in traces:
        if any(step["total_ms"] > 0 for step in trace.steps):
            attempts.setdefault(trace.header["attempt"], []).append(trace)
    for attempt, of_ranks in attempts.items():
        ranks = [trace.header["rank"] for trace in of_ranks]
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        if twice:
            paths = [str(trace.path) for trace in of_ranks if trace.header["rank"] == twice[0]]
            more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
            raise ValueError(
                f"rank {twice[0]} has several traces of attempt {attempt} ({', '.join(paths[:2])}{more}); give those of"
                " one run"
            )
    return attempts


def _notes(attempts: dict[int, list[Trace]], table: StepTable, last: Sequence[Trace], world_size: int) -> list[str]:
    notes = []
    if len(attempts) > 1:
        notes.append(f"attempt {max(attempts)} only, the last of {len(attempts)}")
    if len(table.ranks) < world_size:
        notes.append(f"only {len(table.ranks)} of {world_size} ranks left a trace")
    if world_size > 1 and not table.knows_comm:
        notes.append('communication was not measured; strategy="hpc" does')
    if not knows_memory(last):
        notes.append("memory was not measured; MemoryMonitor() does")
    return notes


def _stalls(table: StepTable) -> list[str]:
    """What few steps cost, which are no bottleneck of the others."""
    total = whole(table)
    median = float(np.median(total))
    is_stalled = total > _STALLED * median
    share = float((total - median)[is_stalled].sum() / total.sum())
    if share < _MUCH_STALLING:
        return []
    longest = int(total.argmax())
    where = table.records[0][longest]
    count = int(is_stalled.sum())
    return [
        f"{count} of {table.steps} steps took more than {_STALLED} times the median, together {share:.0%} of the time;"
        f" the longest {total[longest] / 1e3:.3g} s (epoch {where['epoch']}, batch {where['batch']});"
        " ProfilerWindow(outliers=True) shows what happens in the steps behind one"
    ]


def _find(table: StepTable, traces: Sequence[Trace], world_size: int) -> tuple[list[Finding], list[str]]:
    short = short_of_memory(table, traces)
    findings, doubts = [], []
    candidates = _candidates(table, traces, short, world_size)
    for dimension in dict.fromkeys(candidate.dimension for candidate in candidates):
        largest = max(
            (each for each in candidates if each.dimension == dimension), key=lambda each: _excess(each, table)
        )
        if _excess(largest, table) < 0:
            continue
        confidence = share_confidence(largest.lost, whole(table), largest.threshold)
        finding = Finding(
            dimension,
            min(share_of(largest.lost, table), 1.0),
            largest.evidence,
            min(confidence, largest.most_confidence),
            largest.first_try,
        )
        if confidence >= _LEAST_CONFIDENCE:
            findings.append(finding)
        else:
            doubts.append(f"too few steps to be sure of {dimension} (confidence {confidence:.2f}): {largest.evidence}")
    stragglers = find_stragglers(table, short)
    findings += [_straggler_finding(each) for each in stragglers]
    findings.sort(key=lambda finding: -finding.share)
    risk = pressure(traces)
    if risk is not None and all(finding.dimension != "memory" for finding in findings):
        findings.append(risk)
    waiting = waiting_share(table, stragglers)
    if waiting >= _MUCH_WAITING:
        doubts.append(
            f"ranks wait for each other for {waiting:.0%} of the time, but for none of them always; batches of equal"
            " work (TokenBudgetBatchSampler) or fewer processes on a machine may help"
        )
    return findings, doubts


def _candidates(table: StepTable, traces: Sequence[Trace], short: Mask, world_size: int) -> list[Candidate]:
    is_asynchronous = any(_is_asynchronous(trace) for trace in traces)
    affected = np.asarray(short.any(axis=0))
    candidates = [
        data_rule(table, is_asynchronous=is_asynchronous),
        communication_rule(table, world_size) if table.knows_comm or not is_asynchronous else None,
        retry_rule(table, affected, traces),
    ]
    # The host's times of these phases may be waits for the device.
    if not is_asynchronous:
        candidates += [framework_rule(table), *compute_rules(table, affected)]
    return [candidate for candidate in candidates if candidate is not None]


def _is_asynchronous(trace: Trace) -> bool:
    """Whether the host's clock timed a device that works by itself; a header may name it as ``device_type``."""
    return trace.header["clock"] == "host" and trace.header.get("device_type") not in (None, "cpu")


def _excess(candidate: Candidate, table: StepTable) -> float:
    return share_of(candidate.lost, table) - candidate.threshold


def _straggler_finding(straggler: Straggler) -> Finding:
    repaired = f"a step would take {straggler.repaired_ms:.3g} ms, not {straggler.step_ms:.3g} ms"
    evidence = (
        f"rank {straggler.rank} spends {straggler.own_ms:.3g} ms a step on {straggler.cause} (mostly"
        f" {straggler.phase}), the others {straggler.others_ms:.3g} ms; it is slower in {straggler.slow_steps:.0%} of"
        f" the steps, and without that {repaired}"
    )
    return Finding(
        straggler.cause,
        straggler.share,
        evidence,
        straggler.confidence,
        _STRAGGLER_ADVICE[straggler.cause],
        straggler.rank,
    )


def _sentence(finding: Finding) -> str:
    who = finding.dimension if finding.rank is None else f"{finding.dimension} of rank {finding.rank}"
    what = f"{who} takes {finding.share:.0%} of the time" if finding.share else f"{who} is at risk"
    return f"{what}: {finding.evidence}"


_STRAGGLER_ADVICE = {
    "data": "look at this rank's storage and its processor's load, and at whether its samples are larger",
    "compute": "look at this rank's device (clocks, temperature, other processes) and at the size of its batches",
    "memory": "look at what else holds this rank's memory, and at the size of its batches",
    "framework": "look at callbacks and loggers that work on this rank only; let them do less, or less often",
}
