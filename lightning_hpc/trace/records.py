"""The lines of a trace file: a header, then one for each iteration, span, decision, reading of memory, and event."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hpc.trace.timeline import Span

SCHEMA_NAME = "lightning_hpc.trace"
SCHEMA_VERSION = 1

Record = dict[str, Any]
"""A line of a trace file. Durations are in milliseconds; what is unknown is None, never 0."""

PHASES = ("data_prep", "h2d", "schedule", "forward", "backward", "comm", "optimizer", "unattributed")
"""The parts of an iteration. Their times add up to `total`."""

STEP_KEYS = (
    *("step", "batch", "epoch", "rank", "optimizer_steps", "samples", "start_ms"),
    *(f"{phase}_ms" for phase in PHASES),
    *("total_ms", "comm_bytes"),
)
SPAN_KEYS = ("name", "parent", "epoch", "rank", "start_ms", "duration_ms")
DECISION_KEYS = ("step", "rank", "choice", "reason", "predicted_ms", "measured_ms")
MEMORY_FIGURES = (
    *("memory_used_bytes", "memory_limit_bytes", "memory_reserved_bytes"),
    *("memory_hit_rate", "memory_fragmentation", "memory_retries", "memory_oom_retries"),
    *("gpu_utilization", "gpu_used_bytes"),
)
MEMORY_KEYS = ("step", "epoch", "batch", "rank", "at_ms", *MEMORY_FIGURES)
EVENT_KEYS = ("name", "step", "rank", "at_ms", "details")
HEADER_KEYS = (
    *("schema", "rank", "world_size", "attempt", "host", "pid", "started_at"),
    *("clock_offset_ms", "clock_uncertainty_ms", "clock", "device_type", "versions"),
)


# Most readers refuse NaN, so an encoder that writes it would cost the whole line.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

# An encoder for any object takes several times as long, and this line is written in each iteration. Six decimals of a
# millisecond are whole nanoseconds, so the phases add up in the file as they do in the timeline.
_STEP_LINE = (
    b'{"type":"step","step":%d,"batch":%d,"epoch":%d,"rank":%d,"optimizer_steps":%d,"samples":%s,"start_ms":%.6f,'
    b'"data_prep_ms":%.6f,"h2d_ms":%.6f,"schedule_ms":%.6f,"forward_ms":%.6f,"backward_ms":%.6f,"comm_ms":%s,'
    b'"optimizer_ms":%.6f,"unattributed_ms":%.6f,"total_ms":%.6f,"comm_bytes":%s}\n'
)


def header_line(**values: Any) -> bytes:
    """The first line of a file.

    Args:
        **values: One for each of `HEADER_KEYS` but ``schema``; ``started_at`` is in seconds of Unix time.
    """
    header = {"type": "header", "schema": f"{SCHEMA_NAME}/{SCHEMA_VERSION}", **values}
    assert header.keys() == {"type", *HEADER_KEYS}, header.keys()
    return f"{_encode(header)}\n".encode()


def step_line(
    charged_ns: Sequence[int],
    comm_ns: int | None,
    total_ns: int,
    *,
    step: int,
    batch: int,
    epoch: int,
    rank: int,
    optimizer_steps: int,
    samples: int | None,
    start_ns: int,
    comm_bytes: int | None,
) -> bytes:
    """The line of one iteration.

    Args:
        charged_ns: Nanoseconds by `Phase`, in its order; backward without exposed communication.
        comm_ns: Nanoseconds of exposed communication. None where nobody measures it.
        total_ns: Nanoseconds of the iteration.
        step: Optimizer steps since the start of training.
        batch: Index of the batch in its epoch.
        epoch: Index of the epoch.
        rank: Global rank.
        optimizer_steps: Optimizer steps within the iteration.
        samples: Samples of the batch. None where nobody can tell.
        start_ns: When it began, in nanoseconds since the start of the file.
        comm_bytes: Bytes sent within the iteration. None where nobody counts them.
    """
    data_prep, h2d, schedule, forward, backward, optimizer = charged_ns
    return _STEP_LINE % (
        step,
        batch,
        epoch,
        rank,
        optimizer_steps,
        b"null" if samples is None else b"%d" % samples,
        start_ns / 1e6,
        data_prep / 1e6,
        h2d / 1e6,
        schedule / 1e6,
        forward / 1e6,
        backward / 1e6,
        b"null" if comm_ns is None else b"%.6f" % (comm_ns / 1e6),
        optimizer / 1e6,
        (total_ns - sum(charged_ns) - (comm_ns or 0)) / 1e6,
        total_ns / 1e6,
        b"null" if comm_bytes is None else b"%d" % comm_bytes,
    )


def span_line(span: Span, rank: int) -> bytes:
    """The line of a span; ``start_ms`` counts from the start of the file."""
    record = {
        "type": "span",
        "name": span.name,
        "parent": span.parent,
        "epoch": span.epoch,
        "rank": rank,
        "start_ms": span.start_ns / 1e6,
        "duration_ms": span.duration_ns / 1e6,
    }
    return f"{_encode(record)}\n".encode()


def decision_line(
    *,
    step: int,
    rank: int,
    choice: str,
    reason: str,
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
) -> bytes:
    """The line of what ``compression="auto"`` has decided.

    Args:
        step: Optimizer steps before it.
        rank: Global rank of who decided.
        choice: How gradients are reduced from now on.
        reason: What speaks for it.
        predicted: Seconds a step of each choice, by the cost model.
        measured: Seconds a step of those that were tried.
    """
    record = {
        "type": "decision",
        "step": step,
        "rank": rank,
        "choice": choice,
        "reason": reason,
        "predicted_ms": {name: seconds * 1e3 for name, seconds in predicted.items()},
        "measured_ms": {name: seconds * 1e3 for name, seconds in measured.items()},
    }
    return f"{_encode(record)}\n".encode()


def memory_line(
    figures: Mapping[str, float | None], *, step: int, epoch: int, batch: int, rank: int, at_ns: int
) -> bytes:
    """The line of a reading of memory.

    Args:
        figures: By name, of `MEMORY_FIGURES`; those that are missing are unknown.
        step: Optimizer steps before it.
        epoch: Index of the epoch.
        batch: Index of the last batch that was finished.
        rank: Global rank.
        at_ns: When, in nanoseconds since the start of the file.

    Raises:
        ValueError: If a name is none of `MEMORY_FIGURES`, or a figure is not finite.
    """
    unknown = [name for name in figures if name not in MEMORY_FIGURES]
    if unknown:
        raise ValueError(f"a record of memory has no {unknown[0]!r}; it may have {', '.join(MEMORY_FIGURES)}")
    record = {
        "type": "memory",
        "step": step,
        "epoch": epoch,
        "batch": batch,
        "rank": rank,
        "at_ms": at_ns / 1e6,
        **{name: figures.get(name) for name in MEMORY_FIGURES},
    }
    return f"{_encode(record)}\n".encode()


def event_line(name: str, details: Mapping[str, Any], *, step: int, rank: int, at_ns: int) -> bytes:
    """The line of something that happened.

    Args:
        name: What, for example ``straggler``.
        details: More about it, in types that JSON has.
        step: Optimizer steps before it.
        rank: Global rank.
        at_ns: When, in nanoseconds since the start of the file.

    Raises:
        ValueError: If a number in ``details`` is not finite.
        TypeError: If JSON has no such type.
    """
    record = {"type": "event", "name": name, "step": step, "rank": rank, "at_ms": at_ns / 1e6, "details": dict(details)}
    return f"{_encode(record)}\n".encode()
