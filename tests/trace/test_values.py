import copy
from typing import Any

import pytest

from lightning_hpc.trace import Trace, TraceFileError
from lightning_hpc.trace.values import check_values
from tests.report.run_traces import make_traces, with_memory

BAD = (None, "3", True, [], {}, -1, 10**400, -(10**400), 1e300, float("nan"), float("inf"))


def one_of_each() -> Trace:
    return with_memory(make_traces(steps=30)[0], memory_used_bytes=5.0)


def test_what_was_recorded_passes() -> None:
    check_values(one_of_each())


@pytest.mark.parametrize("value", BAD, ids=[repr(value)[:8] for value in BAD])
@pytest.mark.parametrize("key", ["batch", "forward_ms", "start_ms", "memory_used_bytes", "duration_ms"])
def test_what_is_no_figure_is_named_with_its_line(key: str, value: Any) -> None:
    trace = copy.deepcopy(one_of_each())
    line = next(line for line, record in enumerate(trace.records, start=2) if key in record)
    trace.records[line - 2][key] = value
    if value is None and key == "memory_used_bytes":
        check_values(trace)
        return
    with pytest.raises(TraceFileError, match=rf":{line}: {key} is "):
        check_values(trace)


@pytest.mark.parametrize("key", ["rank", "world_size", "attempt", "started_at", "versions"])
@pytest.mark.parametrize("value", ["x", None, -1])
def test_the_header_is_checked_too(key: str, value: Any) -> None:
    trace = copy.deepcopy(one_of_each())
    trace.header[key] = value
    with pytest.raises(TraceFileError, match=f":1: {key}"):
        check_values(trace)


def test_unattributed_time_may_be_negative() -> None:
    trace = copy.deepcopy(one_of_each())
    trace.steps[0]["unattributed_ms"] = -0.5
    check_values(trace)
