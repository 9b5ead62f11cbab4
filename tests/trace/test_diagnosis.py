import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_hpc.trace import Trace
from lightning_hpc.trace.diagnosis import LEAST_STEPS, diagnose
from lightning_hpc.trace.finding import DIMENSIONS, render
from tests.trace.judging import Confusion, confusion_table, judge_healthy, judge_planted, right_share
from tests.trace.synthetic_runs import JOBS, SHAPES, simulate

JOB = JOBS["50 ms"]
PAIR = JOBS["2 ranks"]


def with_header(traces: list[Trace], **changes: Any) -> list[Trace]:
    return [replace(trace, header={**trace.header, **changes}) for trace in traces]


def with_keys(traces: list[Trace], **keys: Any) -> list[Trace]:
    return [
        replace(trace, records=tuple({**each, **keys} if each["type"] == "step" else each for each in trace.records))
        for trace in traces
    ]


def assert_right(confusion: Confusion, least: float) -> None:
    assert right_share(confusion) >= least, confusion_table(confusion)


def test_planted_bottlenecks_are_found_within_20_steps() -> None:
    assert_right(judge_planted([0], jobs=["10 ms", "Adam, short epochs", "accumulating", "4 ranks"]), 0.95)


def test_healthy_runs_raise_no_alarm() -> None:
    assert_right(judge_healthy(range(54)), 1.0)


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_share_and_dimension_come_with_evidence_and_advice(dimension: str) -> None:
    shape = SHAPES[dimension][-1 if dimension in ("compute", "memory") else 0]
    diagnosis = diagnose(simulate(PAIR, 1, steps=40, dimension=dimension, shape=shape, share=0.4))
    first = diagnosis.findings[0]
    assert (first.dimension, first.rank) == (dimension, None)
    assert first.share == pytest.approx(0.4, abs=0.12)
    assert 0.75 <= first.confidence <= 1
    assert " ms" in first.evidence
    assert first.first_try
    assert diagnosis.headline.startswith(f"{dimension} takes {first.share:.0%} of the time: ")
    assert not diagnosis.is_healthy


def test_findings_are_ordered_by_share() -> None:
    traces = simulate(JOB, 0, steps=40, dimension="data", share=0.3)
    slow = [dict(record) for record in traces[0].records]
    for record in slow:
        if record["type"] == "step":
            record["schedule_ms"] += 100
            record["total_ms"] += 100
    diagnosis = diagnose([replace(traces[0], records=tuple(slow))])
    assert [finding.dimension for finding in diagnosis.findings] == ["framework", "data"]


def test_to_compute_is_healthy() -> None:
    diagnosis = diagnose(simulate(JOB, 3, steps=40))
    assert diagnosis.headline == "healthy"
    assert diagnosis.is_healthy
    assert not diagnosis.findings


@pytest.mark.parametrize("steps", [1, 3, LEAST_STEPS - 1])
def test_too_few_steps_are_not_health(steps: int) -> None:
    diagnosis = diagnose(simulate(JOB, 0, steps=steps, dimension="data", share=0.5))
    assert diagnosis.headline == f"not enough samples ({steps} of 20 steps)"
    assert not diagnosis.is_healthy
    assert not diagnosis.findings


def test_no_step_at_all_is_an_error() -> None:
    trace = simulate(JOB, 0)[0]
    spans = tuple(record for record in trace.records if record["type"] == "span")
    for traces in ([], [replace(trace, records=spans)]):
        with pytest.raises(ValueError, match="nothing to diagnose; give those of a run that has trained"):
            diagnose(traces)


def test_only_the_last_attempt_counts_and_is_named() -> None:
    slow, healthy = simulate(JOB, 0, dimension="data", share=0.5), simulate(JOB, 0)
    diagnosis = diagnose([*slow, *with_header(healthy, attempt=3)])
    assert diagnosis.is_healthy
    assert "attempt 3 only, the last of 2" in diagnosis.notes


def test_two_runs_at_once_are_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"rank 0 has several traces of attempt 0 \(rank_0, other\); give those of one"
    ):
        diagnose([*simulate(JOB, 0), replace(simulate(JOB, 1)[0], path=Path("other"))])


def test_one_disturbed_step_is_no_finding() -> None:
    traces = simulate(JOB, 0, steps=20, variation=0.02)
    records = [dict(record) for record in traces[0].records]
    records[-5]["data_prep_ms"] += 4 * JOB.step_ms
    records[-5]["total_ms"] += 4 * JOB.step_ms
    diagnosis = diagnose([replace(traces[0], records=tuple(records))])
    assert diagnosis.is_healthy
    assert any("too few steps to be sure of data" in note for note in diagnosis.notes)


def test_a_host_that_only_launches_is_not_believed() -> None:
    # Waiting for the device in a transfer or a logger is no bottleneck of either (lightly-train#749).
    for shape in (("framework", "constant"), ("data", "transfer"), ("compute", "optimizer")):
        traces = with_header(simulate(JOB, 0, dimension=shape[0], shape=shape[1], share=0.6), device_type="cuda")
        assert diagnose(traces).is_healthy, shape
    waiting = with_header(simulate(JOB, 0, dimension="data", share=0.6), device_type="cuda")
    (finding,) = diagnose(waiting).findings
    assert finding.confidence == 0.5
    assert "at most" in finding.evidence
    (finding,) = diagnose(with_header(waiting, clock="device")).findings
    assert finding.confidence == 1.0


def test_communication_is_inferred_where_gradients_accumulate_at_times() -> None:
    job = replace(PAIR, accumulate=4)
    slow = simulate(job, 0, steps=40, dimension="communication", share=0.4, with_comm=False)
    diagnosis = diagnose(slow)
    assert [finding.dimension for finding in diagnosis.findings] == ["communication"]
    assert diagnosis.findings[0].confidence == 0.5
    assert any("communication was not measured" in note for note in diagnosis.notes)
    assert diagnose(simulate(job, 0, steps=40, with_comm=False)).is_healthy


def test_communication_of_a_part_of_the_ranks_may_be_waiting() -> None:
    traces = simulate(PAIR, 0, dimension="communication", share=0.4)[:1]
    (finding,) = diagnose(traces).findings
    assert finding.confidence == 0.5
    assert "only 1 of 2 ranks left a file" in finding.evidence


def test_memory_is_unknown_without_its_keys_and_pressure_is_a_risk() -> None:
    traces = simulate(JOB, 0)
    assert "memory was not measured; MemoryMonitor() does" in diagnose(traces).notes
    assert diagnose(with_keys(traces, memory_used_bytes=None, memory_limit_bytes=None)).is_healthy
    assert diagnose(with_keys(traces, memory_used_bytes=90, memory_limit_bytes=100)).is_healthy
    (finding,) = diagnose(with_keys(traces, memory_used_bytes=97, memory_limit_bytes=100)).findings
    assert (finding.dimension, finding.share) == ("memory", 0.0)
    assert "97.0%" in finding.evidence


def test_memory_records_of_their_own_are_read() -> None:
    traces = simulate(JOB, 2, steps=30, dimension="memory", shape="retries", share=0.4)
    records: list[dict[str, Any]] = []
    for record in traces[0].records:
        figures = {key: value for key, value in record.items() if key.startswith("memory_")}
        records.append({key: value for key, value in record.items() if key not in figures})
        if figures:
            records.append({"type": "memory", "epoch": record["epoch"], "batch": record["batch"], "rank": 0, **figures})
    diagnosis = diagnose([replace(traces[0], records=tuple(records))])
    assert [finding.dimension for finding in diagnosis.findings] == ["memory"]
    assert "cache hits 90%" in diagnosis.findings[0].evidence


def test_the_text() -> None:
    text = render(diagnose(simulate(JOB, 0, dimension="framework", share=0.5)))
    lines = text.splitlines()
    assert lines[0].startswith("Diagnosis of 20 steps of 1 rank: framework takes ")
    assert lines[1].startswith("1. framework: ")
    assert lines[3].startswith("   Try first: fewer or rarer callbacks")
    assert lines[-1] == "Note: memory was not measured; MemoryMonitor() does"


def test_the_same_records_give_the_same_diagnosis() -> None:
    traces = simulate(PAIR, 5, steps=60, dimension="data", shape="exponential", share=0.15)
    assert diagnose(traces) == diagnose(reversed(traces))


def test_the_writing_of_checkpoints_is_named() -> None:
    (trace,) = simulate(JOB, 0, steps=30)
    step_ms = statistics.median(step["total_ms"] for step in trace.steps)
    spans = [
        {
            "type": "span",
            "name": "checkpoint",
            "parent": None,
            "epoch": step["epoch"],
            "rank": 0,
            "start_ms": step["start_ms"],
            "duration_ms": step_ms,
        }
        for step in trace.steps[::3]
    ]
    diagnosis = diagnose([replace(trace, records=(*trace.records, *spans))])
    assert diagnosis.findings[0].dimension == "framework"
    assert "is the writing of checkpoints" in diagnosis.findings[0].evidence
    assert diagnosis.findings[0].first_try.startswith("fewer checkpoints")


def test_stalls_of_a_few_steps_are_a_note() -> None:
    (trace,) = simulate(JOBS["10 ms"], 0, steps=200)
    assert not any("took more than" in note for note in diagnose([trace]).notes)
    stalled = trace.steps[50]
    stalled["total_ms"] += 2000.0
    stalled["backward_ms"] += 2000.0
    diagnosis = diagnose([trace])
    assert diagnosis.is_healthy
    (note,) = (note for note in diagnosis.notes if "took more than" in note)
    assert note.startswith("1 of 197 steps took more than 5 times the median, together ")
    assert f"the longest 2.01 s (epoch {stalled['epoch']}, batch {stalled['batch']})" in note
