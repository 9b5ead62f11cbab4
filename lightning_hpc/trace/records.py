"""The lines of a trace file: a header, then one for each iteration, span of time outside iterations, and decision."""

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
    *("step", "batch", "epoch", "rank", "optimizer_steps"),
    *(f"{phase}_ms" for phase in PHASES),
    *("total_ms", "comm_bytes"),
)
SPAN_KEYS = ("name", "epoch", "rank", "start_ms", "duration_ms")
DECISION_KEYS = ("step", "rank", "choice", "reason", "predicted_ms", "measured_ms")
HEADER_KEYS = (
    *("schema", "rank", "world_size", "attempt", "host", "pid", "started_at"),
    *("clock", "device_type", "versions"),
)


# Most readers refuse NaN, so an encoder that writes it would cost the whole line.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

# An encoder for any object takes several times as long, and this line is written in each iteration. Six decimals of a
# millisecond are whole nanoseconds, so the phases add up in the file as they do in the timeline.
_STEP_LINE = (
    b'{"type":"step","step":%d,"batch":%d,"epoch":%d,"rank":%d,"optimizer_steps":%d,'
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
        comm_bytes: Bytes sent within the iteration. None where nobody counts them.
    """
    data_prep, h2d, schedule, forward, backward, optimizer = charged_ns
    return _STEP_LINE % (
        step,
        batch,
        epoch,
        rank,
        optimizer_steps,
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
