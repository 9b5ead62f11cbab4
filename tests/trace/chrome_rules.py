"""The rules of Chrome's trace event format, as far as a reader of it depends on them."""

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NoReturn

Event = dict[str, Any]

_LARGEST_ID = 2**53 - 1
_METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}


def parse(text: str) -> list[Event]:
    """The events of a trace, once it has been found to keep the rules.

    Raises:
        AssertionError: With the event, if it does not.
    """
    trace = json.loads(text, parse_constant=_refuse)
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = trace["traceEvents"]
    for event in events:
        _check(event)
    by_thread: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("X", "B", "E"):
            by_thread[event["pid"], event["tid"]].append(event)
    for of_thread in by_thread.values():
        _check_nesting([event for event in of_thread if event["ph"] == "X"])
        _check_pairs(event for event in of_thread if event["ph"] != "X")
    return events


def _refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def _check(event: Event) -> None:
    assert event["ph"] in ("X", "B", "E", "i", "C", "M"), event
    assert isinstance(event["name"], str), event
    for key in ("pid", "tid") if event["ph"] in ("X", "B", "E", "i") else ("pid",):
        assert type(event[key]) is int, event
        assert 0 <= event[key] <= _LARGEST_ID, event
    if event["ph"] == "M":
        key, kind = _METADATA[event["name"]]
        assert set(event["args"]) == {key}, event
        assert isinstance(event["args"][key], kind), event
        return
    # Relative times: those since 1970 leave a float too few digits below the microsecond.
    assert type(event["ts"]) in (int, float), event
    assert 0 <= event["ts"] < 1e14, event
    assert isinstance(event.get("args", {}), dict), event
    if event["ph"] == "X":
        assert type(event["dur"]) in (int, float), event
        assert event["dur"] >= 0, event
    if event["ph"] == "C":
        assert event["args"], event
        assert all(type(value) in (int, float) for value in event["args"].values()), event
    if event["ph"] == "i":
        assert event["s"] in ("g", "p", "t"), event


def _check_nesting(slices: list[Event]) -> None:
    """Slices of a thread lie apart or within each other."""
    times = sorted((round(each["ts"] * 1000), -round(each["dur"] * 1000), each["name"]) for each in slices)
    open_ends: list[int] = []
    for start, negative_duration, name in times:
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        end = start - negative_duration
        assert not open_ends or end <= open_ends[-1], f"{name} at {start} ns crosses the end of another"
        open_ends.append(end)


def _check_pairs(events: Iterable[Event]) -> None:
    names: list[str] = []
    for event in sorted(events, key=lambda each: float(each["ts"])):
        if event["ph"] == "B":
            names.append(event["name"])
        else:
            assert names, event
            assert names.pop() == event["name"], event
    assert not names, f"{names} are never ended"
