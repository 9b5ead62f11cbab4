"""Checks the values of a trace, whose keys the reader has checked: somebody may have changed the file."""

from lightning_hpc.trace.reader import Trace, TraceFileError
from lightning_hpc.trace.records import MEMORY_FIGURES, PHASES, Record

_COUNTS = {
    "header": ("rank", "world_size", "attempt"),
    "step": ("step", "batch", "epoch", "optimizer_steps"),
    "span": (),
    "decision": ("step",),
    "memory": ("step", "epoch", "batch"),
    "event": ("step",),
}
_TIMES = {
    "header": ("started_at",),
    "step": ("start_ms", "total_ms", *(f"{phase}_ms" for phase in PHASES if phase != "comm")),
    "span": ("start_ms", "duration_ms"),
    "decision": (),
    "memory": ("at_ms",),
    "event": ("at_ms",),
}
_OPTIONAL = {
    "header": ("clock_uncertainty_ms",),
    "step": ("comm_ms", "comm_bytes", "samples"),
    "span": ("epoch",),
    "memory": MEMORY_FIGURES,
}
# Two clocks that do not agree.
_SIGNED = ("unattributed_ms",)
_LARGEST = 1e15
_DAMAGED = "the file was changed or damaged after it was written; delete this line to read the rest"


def check_values(trace: Trace) -> None:
    """Checks that counts, times and figures are what they should be.

    Raises:
        TraceFileError: If one is no number, less than zero, or too large to be true.
    """
    _check(trace, 1, trace.header, "header")
    if not isinstance(trace.header["versions"], dict):
        raise TraceFileError(trace.path, 1, "versions of the header is no object", _DAMAGED)
    for line, record in enumerate(trace.records, start=2):
        _check(trace, line, record, record["type"])


def _check(trace: Trace, line: int, record: Record, kind: str) -> None:
    for key in _COUNTS[kind]:
        if type(record[key]) is not int or not 0 <= record[key] <= _LARGEST:
            raise TraceFileError(trace.path, line, f"{key} is {_shown(record[key])}, which is no count", _DAMAGED)
    for key in (*_TIMES[kind], *_OPTIONAL.get(kind, ())):
        value = record[key]
        if value is None and key not in _TIMES[kind]:
            continue
        # Before it is compared: an integer may have hundreds of digits, and a NaN compares with nothing.
        if type(value) not in (int, float) or not abs(value) <= _LARGEST or (value < 0 and key not in _SIGNED):
            raise TraceFileError(trace.path, line, f"{key} is {_shown(value)}, which is no such figure", _DAMAGED)


def _shown(value: object) -> str:
    return repr(value)[:40]
