import json
from dataclasses import replace

import pytest

from lightning_hpc.report.run_report import SCHEMA, report_of
from tests.report.run_traces import complete, make_traces, with_memory, with_records


def test_the_figures_are_those_of_the_records() -> None:
    traces = make_traces("2 ranks", steps=40)
    report = report_of(traces)
    head = report.headline
    totals = sorted(step["total_ms"] for trace in traces for step in trace.steps)
    assert totals[39] <= head.step_ms <= totals[40]
    assert head.step_ms <= head.step_p95_ms <= head.step_p99_ms <= totals[-1]
    rates = [sum(s["samples"] for s in trace.steps) / sum(s["total_ms"] for s in trace.steps) for trace in traces]
    assert head.samples_per_second == pytest.approx(1e3 * sum(rates))
    comm = sum(step["comm_ms"] for trace in traces for step in trace.steps)
    assert head.comm_share == pytest.approx(comm / sum(totals))
    assert head.steps == 40
    assert [rank.rank for rank in report.ranks] == [0, 1]
    assert report.ranks[1].phases_ms["forward"] == pytest.approx(
        sum(step["forward_ms"] for step in traces[1].steps) / 40
    )
    assert report.missing_ranks == ()


def test_accumulation_does_not_divide_the_throughput() -> None:
    (trace,) = make_traces("accumulating", steps=40)
    rate = report_of([trace]).headline.samples_per_second
    assert rate == pytest.approx(40 * 16 / sum(step["total_ms"] for step in trace.steps) * 1e3)


def test_time_adds_up_and_nested_spans_count_once() -> None:
    (trace,) = make_traces(steps=30)
    span = {"type": "span", "name": "validation", "parent": None, "epoch": 0, "rank": 0, "start_ms": 5.0}
    inner = {**span, "name": "checkpoint", "parent": "validation", "duration_ms": 400.0}
    report = report_of([with_records(trace, inner, {**span, "duration_ms": 500.0})])
    assert report.time_s["validation"] == 0.5
    assert "checkpoint" not in report.time_s
    assert report.time_s["training"] == pytest.approx(sum(step["total_ms"] for step in trace.steps) / 1e3)


def test_the_last_attempt_is_reported_and_the_others_are_listed() -> None:
    first, second = make_traces(steps=25), make_traces(steps=35, attempt=3)
    never_trained = complete(replace(first[0], records=()), attempt=4)
    report = report_of([*second, *first, never_trained])
    assert (report.attempt, report.headline.steps) == (3, 35)
    assert [(each.attempt, each.steps) for each in report.attempts] == [(0, 25), (3, 35), (4, 0)]


def test_missing_ranks_are_named() -> None:
    traces = make_traces("4 ranks")
    assert report_of([traces[3], traces[1]]).missing_ranks == (0, 2)


def test_what_nobody_measured_is_none_and_the_file_has_no_nan() -> None:
    traces = make_traces("2 ranks", with_comm=False)
    for trace in traces:
        trace.steps[3]["samples"] = None
    head = report_of(traces).headline
    unknown = (head.samples_per_second, head.peak_memory_bytes, head.peak_memory_share, head.gpu_utilization)
    assert (*unknown, head.comm_share) == (None,) * 5
    content = json.loads(
        report_of(traces, {"loss": float("nan"), "accuracy": 0.5}).to_json(), parse_constant=pytest.fail
    )
    assert content["schema"] == SCHEMA
    assert content["metrics"] == {"loss": None, "accuracy": 0.5}
    assert "comm" not in content["series"]["phases_ms"]


def test_memory_has_its_peak_and_a_curve_a_rank() -> None:
    traces = make_traces("2 ranks")
    traces = [
        with_memory(trace, memory_used_bytes=(rank + 1) * 100, memory_limit_bytes=400, gpu_utilization=0.5)
        for rank, trace in enumerate(traces)
    ]
    report = report_of(traces)
    assert (report.headline.peak_memory_bytes, report.headline.peak_memory_share) == (200, 0.5)
    assert report.headline.gpu_utilization == 0.5
    assert [curve.name for curve in report.memory["memory_used_bytes"]] == ["rank 0", "rank 1"]
    assert "memory_hit_rate" not in report.memory


def test_no_iteration_is_an_error() -> None:
    with pytest.raises(ValueError, match="no trace holds an iteration"):
        report_of([complete(replace(make_traces()[0], records=()))])
