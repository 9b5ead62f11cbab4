import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_hpc.trace import Trace
from lightning_hpc.trace.chrome_trace import LAYOUT_NOTE, chrome_trace
from lightning_hpc.trace.records import MEMORY_FIGURES, PHASES
from tests.trace.chrome_rules import Event, parse


def header(rank: int = 0, **values: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "world_size": 2,
        "attempt": 0,
        "host": f"host{rank}",
        "started_at": 1_800_000_000.0,
        "clock_offset_ms": None,
        "clock_uncertainty_ms": None,
        **values,
    }


def step(start_ms: float, phases: dict[str, float | None], **values: Any) -> dict[str, Any]:
    times = {f"{phase}_ms": phases.get(phase, 0.0) for phase in PHASES}
    total = sum(time for time in times.values() if time is not None)
    where = {"step": 1, "batch": 0, "epoch": 0, "optimizer_steps": 1, "samples": 4, "comm_bytes": None}
    return {"type": "step", **where, "start_ms": start_ms, **times, "total_ms": total, **values}


def span(name: str, start_ms: float, duration_ms: float, parent: str | None = None) -> dict[str, Any]:
    times = {"start_ms": start_ms, "duration_ms": duration_ms}
    return {"type": "span", "name": name, "epoch": 0, "parent": parent, **times}


def make_trace(*records: dict[str, Any], **values: Any) -> Trace:
    first = header(**values)
    return Trace(Path(f"attempt_{first['attempt']}/rank_{first['rank']}"), first, records)


def export(*traces: Trace, attempt: int | None = None) -> list[Event]:
    return parse("".join(chrome_trace(traces, attempt)))


def slices(events: list[Event], thread: str, rank: int = 0) -> list[tuple[str, float, float]]:
    """Name, start and end in microseconds."""
    of_rank = [event for event in events if event["pid"] == rank]
    (tid,) = (each["tid"] for each in of_rank if each["name"] == "thread_name" and each["args"]["name"] == thread)
    found = [each for each in of_rank if each["ph"] == "X" and each["tid"] == tid]
    return [(each["name"], each["ts"], round(each["ts"] + each["dur"], 3)) for each in found]


def test_each_rank_is_a_process_with_its_host() -> None:
    events = export(make_trace(rank=0), make_trace(rank=3, host="näch\u2028ste \ud83d"))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0 · host0", 3: "rank 3 · näch\u2028ste \ud83d"}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert order == {0: 0, 3: 3}


def test_phases_lie_in_the_order_of_the_loop_from_the_start_of_their_iteration() -> None:
    phases = {phase: float(number) for number, phase in enumerate(PHASES, start=1)}
    text = "".join(chrome_trace([make_trace(step(5.0, phases))]))
    events = parse(text)
    assert slices(events, "iterations") == [("iteration", 5000.0, 41000.0)]
    drawn = slices(events, "phases")
    assert [name for name, _, _ in drawn] == list(PHASES)
    assert [end - start for _, start, end in drawn] == [1000.0 * number for number in range(1, 9)]
    assert [start for _, start, _ in drawn[1:]] == [end for _, _, end in drawn[:-1]]
    assert json.loads(text)["otherData"]["phases"] == LAYOUT_NOTE


def test_phases_that_are_unknown_or_took_no_time_are_not_drawn() -> None:
    events = export(make_trace(step(0.0, {"forward": 2.0, "comm": None, "optimizer": 1.0})))
    assert slices(events, "phases") == [("forward", 0.0, 2000.0), ("optimizer", 2000.0, 3000.0)]


def test_phases_that_add_up_to_more_than_their_iteration_are_cut() -> None:
    first = step(0.0, {"forward": 2.0, "optimizer": 1.0, "unattributed": -0.5})
    events = export(make_trace(first, step(2.5, {"forward": 1.0})))
    assert slices(events, "iterations") == [("iteration", 0.0, 2500.0), ("iteration", 2500.0, 3500.0)]
    assert slices(events, "phases")[:2] == [("forward", 0.0, 2000.0), ("optimizer", 2000.0, 2500.0)]


def test_spans_within_an_iteration_push_its_end_out() -> None:
    events = export(
        make_trace(
            span("loader_start", 0.0, 10.0),
            # As StepTrace writes them: a span that others hold after those, an iteration after its spans.
            span("checkpoint", 22.0, 3.0, parent="validation"),
            span("validation", 20.0, 7.0),
            span("logging", 27.5, 0.5),
            step(10.0, {"forward": 10.5}),
            span("between_epochs", 28.0, 4.0),
            step(32.0, {"forward": 1.0}),
        )
    )
    assert slices(events, "iterations") == [("iteration", 10000.0, 28000.0), ("iteration", 32000.0, 33000.0)]
    assert ("checkpoint", 22000.0, 25000.0) in slices(events, "spans")


def test_memory_becomes_counters_without_gaps_drawn_as_zero() -> None:
    figures = dict.fromkeys(MEMORY_FIGURES) | {"memory_used_bytes": 2**40 + 1, "memory_hit_rate": 0.5}
    events = export(make_trace({"type": "memory", "at_ms": 1.5, "step": 1, **figures}))
    counters = [(event["name"], event["ts"], event["args"]) for event in events if event["ph"] == "C"]
    assert counters == [
        ("memory_used_bytes", 1500.0, {"memory_used_bytes": 2**40 + 1}),
        ("memory_hit_rate", 1500.0, {"memory_hit_rate": 0.5}),
    ]


def test_events_and_decisions_are_instants() -> None:
    decision = {
        "type": "decision",
        "step": 1,
        "choice": "int8",
        "reason": "slow",
        "predicted_ms": {},
        "measured_ms": {},
    }
    event = {"type": "event", "name": "straggler", "step": 1, "at_ms": 7.0, "details": {"rank": 1}}
    events = export(make_trace(step(0.0, {"forward": 5.0}), decision, event))
    instants = [(each["name"], each["ts"]) for each in events if each["ph"] == "i"]
    assert instants == [("decision: int8", 5000.0), ("straggler", 7000.0)]
    assert events[-1]["args"] == {"step": 1, "details": {"rank": 1}}


def test_ranks_are_aligned_by_their_start_and_the_distance_of_their_clocks() -> None:
    work = step(100.0, {"forward": 1.0})
    ahead = make_trace(work, rank=1, started_at=1_800_000_002.0, clock_offset_ms=1500.0, clock_uncertainty_ms=0.2)
    behind = make_trace(work, rank=2, started_at=1_799_999_999.0, clock_offset_ms=-1250.0, clock_uncertainty_ms=0.2)
    text = "".join(chrome_trace([make_trace(work), ahead, behind]))
    starts = [slices(parse(text), "iterations", rank)[0][1] for rank in range(3)]
    assert starts == [100_000.0, 600_000.0, 350_000.0]
    assert json.loads(text)["otherData"]["clock_uncertainty_ms"] == {"0": None, "1": 0.2, "2": 0.2}


def test_the_last_attempt_unless_another_one_is_asked_for() -> None:
    traces = [make_trace(step(0.0, {"forward": float(number)}), attempt=number) for number in (0, 1, 2)]
    assert slices(export(*traces), "iterations") == [("iteration", 0.0, 2000.0)]
    assert slices(export(*traces, attempt=1), "iterations") == [("iteration", 0.0, 1000.0)]
    with pytest.raises(ValueError, match="there is no attempt 3; those that there are: 0, 1, 2"):
        chrome_trace(traces, 3)


def test_traces_of_two_runs_are_refused() -> None:
    other = Trace(Path("other/rank_0"), header(), ())
    with pytest.raises(ValueError, match=r"rank 0 has several traces of attempt 0 \(attempt_0/rank_0, other/rank_0\)"):
        chrome_trace([make_trace(), other])
    with pytest.raises(ValueError, match="no traces"):
        chrome_trace([])


def test_details_that_json_cannot_hold_are_an_error_that_names_the_file() -> None:
    event = {"type": "event", "name": "e", "step": 0, "at_ms": 0, "details": {"x": float("inf")}}
    with pytest.raises(ValueError, match=r"attempt_0/rank_0: .*finite"):
        list(chrome_trace([make_trace(event)]))


def random_records(rng: random.Random) -> list[dict[str, Any]]:
    """What the timeline may hand out: whole nanoseconds, here as milliseconds."""

    def some(most_ms: float) -> int:
        return round(rng.uniform(0, most_ms * 1e6))

    now = some(50)
    records = [span("startup", 0.0, now / 1e6)]
    for _ in range(rng.randrange(30)):
        if rng.random() < 0.2:
            duration = some(5)
            records.append(span("between_epochs", now / 1e6, duration / 1e6))
            now += duration
        phases: dict[str, float | None] = {phase: rng.choice([0, some(2)]) / 1e6 for phase in PHASES}
        phases["unattributed"] = rng.uniform(-0.3, 0.3)
        iteration = step(now / 1e6, phases)
        total = round(max(iteration["total_ms"], 0.0) * 1e6)
        inside = some(3) if rng.random() < 0.3 else 0
        if inside:
            records.append(span("logging", (now + total + inside // 3) / 1e6, inside // 3 / 1e6, parent="validation"))
            records.append(span("validation", (now + total) / 1e6, inside / 1e6))
        records.append({**iteration, "total_ms": total / 1e6})
        now += total + inside
    return records


@pytest.mark.parametrize("seed", range(20))
def test_any_run_keeps_the_rules_of_the_format(seed: int) -> None:
    rng = random.Random(seed)
    traces = [
        make_trace(*random_records(rng), rank=rank, started_at=1.8e9 + rng.random(), clock_offset_ms=rng.gauss(0, 100))
        for rank in range(3)
    ]
    events = export(*traces)
    assert min(event["ts"] for event in events if "ts" in event) == 0.0


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([{"ph": "X", "ts": 0, "dur": 2}, {"ph": "X", "ts": 1, "dur": 2}], "crosses"),
        ([{"ph": "X", "ts": 1_800_000_000_000_000, "dur": 2}], "1800000000000000"),
        ([{"ph": "X", "ts": "1", "dur": 2}], "'1'"),
        ([{"ph": "X", "ts": 0, "dur": -1}], "-1"),
        ([{"ph": "B", "ts": 0}], "never ended"),
        ([{"ph": "i", "ts": 0, "s": "t", "tid": 2**53}], "9007199254740992"),
        ([{"ph": "C", "ts": 0, "args": {"a": None}}], "None"),
    ],
)
def test_the_rules_refuse_what_breaks_them(events: list[Event], message: str) -> None:
    whole = [{"pid": 0, "tid": 0, "name": "a", **event} for event in events]
    with pytest.raises(AssertionError, match=message):
        parse(json.dumps({"displayTimeUnit": "ms", "traceEvents": whole}))
    with pytest.raises(AssertionError, match="NaN"):
        parse('{"displayTimeUnit": "ms", "traceEvents": [NaN]}')


def peak_bytes(action: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_text_is_not_held_in_memory() -> None:
    records = tuple(step(float(number), {"forward": 0.5, "backward": 0.5}) for number in range(3000))
    trace = make_trace(*records)

    def write_nowhere() -> None:
        for _ in chrome_trace([trace]):
            pass

    assert sum(map(len, chrome_trace([trace]))) > 500_000
    assert peak_bytes(write_nowhere) < 100_000
