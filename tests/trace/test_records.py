import json

import pytest

from lightning_hpc.trace.records import (
    DECISION_KEYS,
    EVENT_KEYS,
    HEADER_KEYS,
    MEMORY_KEYS,
    SPAN_KEYS,
    STEP_KEYS,
    decision_line,
    event_line,
    header_line,
    memory_line,
    span_line,
    step_line,
)
from lightning_hpc.trace.timeline import Phase, Span

TAGS = {"step": 7, "batch": 3, "epoch": 1, "rank": 2, "optimizer_steps": 1, "samples": 32}
UNSAID = {**TAGS, "samples": None}


def test_a_step_has_its_keys_in_order_and_its_times_in_milliseconds() -> None:
    charged = [(phase + 1) * 1_000_001 for phase in Phase]
    line = step_line(charged, 500_000, 30_000_000, **TAGS, start_ns=1_500_000, comm_bytes=99)
    record = json.loads(line)
    assert line.endswith(b"}\n")
    assert tuple(record) == ("type", *STEP_KEYS)
    for phase in Phase:
        assert record[f"{phase.name.lower()}_ms"] == charged[phase] / 1e6
    assert record["comm_ms"] == 0.5
    assert record["unattributed_ms"] == (30_000_000 - sum(charged) - 500_000) / 1e6
    assert record["comm_bytes"] == 99
    assert record["start_ms"] == 1.5
    assert {key: record[key] for key in TAGS} == TAGS


def test_what_is_unknown_is_null_and_the_rest_is_signed() -> None:
    record = json.loads(step_line([1] * len(Phase), None, 1, **UNSAID, start_ns=0, comm_bytes=None))
    assert record["comm_ms"] is None
    assert record["comm_bytes"] is None
    assert record["samples"] is None
    assert record["unattributed_ms"] == -5e-6


@pytest.mark.parametrize("nanoseconds", [0, 1, 999_999, 86_400_000_000_001, 10**15 + 1])
def test_a_nanosecond_survives(nanoseconds: int) -> None:
    record = json.loads(step_line([nanoseconds, 0, 0, 0, 0, 0], 0, nanoseconds, **TAGS, start_ns=0, comm_bytes=0))
    assert round(record["data_prep_ms"] * 1e6) == nanoseconds


def test_span_and_header_lines() -> None:
    record = json.loads(span_line(Span("startup", None, 0, 2_500_000), rank=1))
    assert tuple(record) == ("type", *SPAN_KEYS)
    assert record["duration_ms"] == 2.5
    header = json.loads(header_line(**{key: 0 for key in HEADER_KEYS if key != "schema"}))
    assert header["schema"] == "lightning_hpc.trace/1"


def test_a_decision_has_its_keys_and_its_times_in_milliseconds() -> None:
    line = decision_line(step=24, rank=0, choice="int4", reason="fast", predicted={"ddp": 0.5}, measured={"int4": 0.25})
    record = json.loads(line)
    assert sorted(record) == sorted(("type", *DECISION_KEYS))
    assert record["predicted_ms"] == {"ddp": 500.0}
    assert record["measured_ms"] == {"int4": 250.0}


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        header_line(**{key: float("nan") for key in HEADER_KEYS if key != "schema"})


def test_a_reading_of_memory_has_all_its_keys() -> None:
    where = {"step": 3, "epoch": 1, "batch": 2, "rank": 0}
    record = json.loads(memory_line({"memory_used_bytes": 5}, **where, at_ns=2_500_000))
    assert tuple(record) == ("type", *MEMORY_KEYS)
    assert (record["memory_used_bytes"], record["memory_limit_bytes"], record["at_ms"]) == (5, None, 2.5)
    with pytest.raises(ValueError, match="no 'used'; it may have memory_used_bytes, "):
        memory_line({"used": 5}, **where, at_ns=0)


def test_an_event_has_its_keys() -> None:
    record = json.loads(event_line("straggler", {"slow": [1, None]}, step=3, rank=1, at_ns=1_000))
    assert tuple(record) == ("type", *EVENT_KEYS)
    assert record["details"] == {"slow": [1, None]}
    with pytest.raises(ValueError, match="Out of range"):
        event_line("straggler", {"slow": float("nan")}, step=3, rank=1, at_ns=0)
