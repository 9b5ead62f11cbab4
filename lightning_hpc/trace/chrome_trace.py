"""Chrome's trace event format, which Perfetto opens: one process row a rank, on one time axis.

A process has threads for its iterations, for the phases in them, for spans, and for events; readings of memory are
counters. Times are microseconds since the earliest start of all ranks, on the clock of rank 0 as far as the headers
know its distance. Boundaries are whole nanoseconds, so that slices which touch do not overlap.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_hpc.trace.reader import Trace
from lightning_hpc.trace.records import MEMORY_FIGURES, PHASES, Record

LAYOUT_NOTE = (
    "A phase was recorded as a sum over its iteration, so its place in it is not known: phases are drawn one after the"
    " other from the iteration's start, in the order of the loop. Where they add up to more than the iteration, the"
    " last ones are cut."
)
_THREADS = {"iterations": 1, "phases": 2, "spans": 3, "events": 4}
_ITERATION_ARGUMENTS = ("step", "batch", "epoch", "optimizer_steps", "samples", "comm_bytes")
_DECISION_ARGUMENTS = ("step", "choice", "reason", "predicted_ms", "measured_ms")

# Most readers refuse NaN.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def chrome_trace(traces: Iterable[Trace], attempt: int | None = None) -> Iterator[str]:
    """The text of a trace in Chrome's JSON format, in pieces of one line each, so that nobody has to hold it.

    Args:
        traces: Of one run, one a rank and attempt. Gone through twice: headers at once, records when the text is
            asked for, one trace after the other. What reads a file only when it comes to it needs the memory of one.
        attempt: Which one. None means the last.

    Raises:
        ValueError: If there is no such attempt, or two traces are of the same rank in it; while the text is made, if
            details of an event hold what is no finite number. The message names the file.
    """
    headers = [(trace.path, trace.header) for trace in traces]
    attempt = _choose_attempt(headers, attempt)
    chosen = {path: header for path, header in headers if header["attempt"] == attempt}
    _require_one_trace_a_rank(chosen)
    starts = {path: _aligned_start_ns(header) for path, header in chosen.items()}
    return _pieces(traces, attempt, starts, _metadata(chosen, attempt))


def _choose_attempt(headers: list[tuple[Path, Record]], attempt: int | None) -> int:
    attempts = sorted({header["attempt"] for _, header in headers})
    if not attempts:
        raise ValueError("there are no traces to export")
    if attempt is not None and attempt not in attempts:
        raise ValueError(f"there is no attempt {attempt}; those that there are: {', '.join(map(str, attempts))}")
    return int(attempts[-1]) if attempt is None else attempt


def _require_one_trace_a_rank(chosen: dict[Path, Record]) -> None:
    path_of: dict[int, Path] = {}
    for path, header in chosen.items():
        other = path_of.setdefault(header["rank"], path)
        if other != path:
            raise ValueError(
                f"rank {header['rank']} has several traces of attempt {header['attempt']} ({other}, {path}); give those"
                " of one run"
            )


def _aligned_start_ns(header: Record) -> int:
    """When the file began, in nanoseconds of rank 0's Unix time."""
    return _whole_ns(header["started_at"] * 1e3) - _whole_ns(header["clock_offset_ms"] or 0.0)


def _metadata(chosen: dict[Path, Record], attempt: int) -> Record:
    return {
        "attempt": attempt,
        "world_size": max(header["world_size"] for header in chosen.values()),
        "phases": LAYOUT_NOTE,
        "clock_offset_ms": {str(header["rank"]): header["clock_offset_ms"] for header in chosen.values()},
        "clock_uncertainty_ms": {str(header["rank"]): header["clock_uncertainty_ms"] for header in chosen.values()},
    }


def _pieces(traces: Iterable[Trace], attempt: int, starts: dict[Path, int], metadata: Record) -> Iterator[str]:
    origin = min(starts.values())
    yield f'{{"displayTimeUnit":"ms","otherData":{_encode(metadata)},"traceEvents":[\n'
    separator = ""
    for trace in traces:
        if trace.header["attempt"] != attempt:
            continue
        rank = _Rank(trace, starts[trace.path] - origin)
        for event in rank.events():
            yield separator + event
            separator = ",\n"
    yield "\n]}\n"


def _whole_ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


class _Rank:
    """Makes the events of one trace, in the order of its records.

    Args:
        trace: The trace.
        shift_ns: What is added to its times.
    """

    def __init__(self, trace: Trace, shift_ns: int) -> None:
        self._trace = trace
        self._rank = trace.header["rank"]
        self._shift_ns = shift_ns
        self._last_end = shift_ns
        # Start and duration of spans since the last iteration's record. They are written before that of theirs.
        self._spans: list[tuple[int, int]] = []

    def events(self) -> Iterator[str]:
        yield from self._names()
        for record in self._trace.records:
            kind = record["type"]
            if kind == "step":
                yield from self._iteration(record)
            elif kind == "span":
                yield self._span(record)
            elif kind == "memory":
                yield from self._counters(record)
            elif kind == "event":
                yield self._instant(record["name"], self._time(record, "at_ms"), record, ("step", "details"))
            elif kind == "decision":
                # It has no time of its own, but is written behind the iteration after which it was taken.
                name = f"decision: {record['choice']}"
                yield self._instant(name, self._last_end, record, _DECISION_ARGUMENTS)

    def _names(self) -> Iterator[str]:
        name = f"rank {self._rank} · {self._trace.header['host']}"
        yield self._event("M", name="process_name", args={"name": name})
        yield self._event("M", name="process_sort_index", args={"sort_index": self._rank})
        for name, thread in _THREADS.items():
            yield self._event("M", tid=thread, name="thread_name", args={"name": name})
            yield self._event("M", tid=thread, name="thread_sort_index", args={"sort_index": thread})

    def _iteration(self, record: Record) -> Iterator[str]:
        # Two clock readings lie between an end and the next start, but another writer may round.
        start = max(self._time(record, "start_ms"), self._last_end)
        inside = sum(duration for begun, duration in self._spans if begun >= start)
        self._spans.clear()
        end = start + _whole_ns(record["total_ms"]) + inside
        self._last_end = end
        arguments = {key: record[key] for key in _ITERATION_ARGUMENTS}
        yield self._slice("iterations", "iteration", start, end, arguments)
        for phase in PHASES:
            milliseconds = record[f"{phase}_ms"]
            if milliseconds is None:
                continue
            stop = min(start + _whole_ns(milliseconds), end)
            if stop > start:
                yield self._slice("phases", phase, start, stop)
                start = stop

    def _span(self, record: Record) -> str:
        start, duration = self._time(record, "start_ms"), _whole_ns(record["duration_ms"])
        if record["parent"] is None:
            self._spans.append((start, duration))
        arguments = {"epoch": record["epoch"], "within": record["parent"]}
        return self._slice("spans", record["name"], start, start + duration, arguments)

    def _counters(self, record: Record) -> Iterator[str]:
        time = self._time(record, "at_ms")
        for name in MEMORY_FIGURES:
            value = record[name]
            # A gap is not a zero.
            if value is not None:
                yield self._event("C", name=name, ts=time / 1e3, args={name: value})

    def _instant(self, name: str, time: int, record: Record, keys: Iterable[str]) -> str:
        arguments = {key: record[key] for key in keys}
        return self._event("i", tid=_THREADS["events"], name=name, ts=time / 1e3, s="t", args=arguments)

    def _slice(self, thread: str, name: str, start: int, end: int, arguments: Record | None = None) -> str:
        times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
        return self._event("X", tid=_THREADS[thread], name=name, **times, **({"args": arguments} if arguments else {}))

    def _event(self, phase: str, **values: Any) -> str:
        try:
            return _encode({"ph": phase, "pid": self._rank, **values})
        except ValueError:
            raise ValueError(f"{self._trace.path}: {values} holds what is no finite number") from None

    def _time(self, record: Record, key: str) -> int:
        return _whole_ns(record[key]) + self._shift_ns
