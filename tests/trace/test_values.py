import copy
from typing import Any

import pytest

from lightning_hpc.trace import Trace
from lightning_hpc.trace.records import Record
from lightning_hpc.trace.values import problem_of
from tests.report.run_traces import make_traces, with_memory

BAD = (None, "3", True, [], {}, -1, 10**400, -(10**400), 1e300, float("nan"), float("inf"))


def one_of_each() -> Trace:
    return with_memory(make_traces(steps=30)[0], memory_used_bytes=5.0)


def first_with(key: str) -> Record:
    return copy.deepcopy(next(record for record in one_of_each().records if key in record))


def test_what_was_recorded_passes() -> None:
    trace = one_of_each()
    assert problem_of(trace.header, "header") is None
    assert {problem_of(record, record["type"]) for record in trace.records} == {None}


@pytest.mark.parametrize("value", BAD, ids=[repr(value)[:8] for value in BAD])
@pytest.mark.parametrize("key", ["batch", "forward_ms", "start_ms", "memory_used_bytes", "duration_ms"])
def test_what_is_no_figure_is_named(key: str, value: Any) -> None:
    record = {**first_with(key), key: value}
    problem = problem_of(record, record["type"])
    if value is None and key == "memory_used_bytes":
        assert problem is None
        return
    assert problem is not None
    assert problem.startswith(f"{key} is ")
    assert len(problem) < 100


@pytest.mark.parametrize(
    "key", ["rank", "world_size", "attempt", "started_at", "versions", "host", "clock", "clock_offset_ms"]
)
@pytest.mark.parametrize("value", [["x"], float("nan"), 1e300])
def test_the_header_is_checked_too(key: str, value: Any) -> None:
    problem = problem_of({**one_of_each().header, key: value}, "header")
    assert problem is not None
    assert problem.startswith(f"{key} is ")


@pytest.mark.parametrize("key", ["unattributed_ms", "clock_offset_ms"])
def test_differences_of_clocks_may_be_negative(key: str) -> None:
    record, kind = (first_with(key), "step") if key == "unattributed_ms" else (one_of_each().header, "header")
    assert problem_of({**record, key: -0.5}, kind) is None
