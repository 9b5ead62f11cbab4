"""Reads trace files. Everything about a file is checked here, so that what follows can rely on its records."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lightning_hpc.trace.records import (
    DECISION_KEYS,
    EVENT_KEYS,
    HEADER_KEYS,
    MEMORY_KEYS,
    SCHEMA_NAME,
    SCHEMA_VERSION,
    SPAN_KEYS,
    STEP_KEYS,
    Record,
)

_KEYS = {
    "header": HEADER_KEYS,
    "step": STEP_KEYS,
    "span": SPAN_KEYS,
    "decision": DECISION_KEYS,
    "memory": MEMORY_KEYS,
    "event": EVENT_KEYS,
}


class TraceFileError(ValueError):
    """A file is not a readable trace. The message names the file and the line, and says what to do."""

    def __init__(self, path: Path, line: int, problem: str, way_out: str) -> None:
        super().__init__(f"{path}:{line}: {problem}; {way_out}")


@dataclass(frozen=True)
class Trace:
    """What one rank recorded in one attempt.

    Attributes:
        path: The file.
        header: Its first line.
        records: The other lines, in order.
    """

    path: Path
    header: Record
    records: tuple[Record, ...]

    @property
    def steps(self) -> list[Record]:
        """The records of iterations."""
        return self._of_type("step")

    @property
    def spans(self) -> list[Record]:
        """The records of time outside iterations."""
        return self._of_type("span")

    @property
    def decisions(self) -> list[Record]:
        """The records of what ``compression="auto"`` has decided."""
        return self._of_type("decision")

    @property
    def memory(self) -> list[Record]:
        """The readings of memory."""
        return self._of_type("memory")

    @property
    def events(self) -> list[Record]:
        """The records of what callbacks and plugins have done or found."""
        return self._of_type("event")

    def _of_type(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["type"] == kind]


def read_trace(path: str | Path) -> Trace:
    """Reads one file. A torn last line, as ``kill -9`` leaves it, is left out.

    Raises:
        TraceFileError: If the file is empty, is no trace, has a newer schema, or has a bad line that is not torn.
        OSError: If it cannot be read.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n")
    # A whole line ends with a newline, so what follows the last one is nothing, or torn.
    del lines[-1]
    if not lines:
        raise TraceFileError(path, 1, "the file has no whole line", "its run ended before it began; delete the file")
    header = _parse_header(path, lines[0])
    records = [_parse(path, number, line) for number, line in enumerate(lines[1:], start=2)]
    return Trace(path, header, tuple(records))


def read_traces(path: str | Path) -> list[Trace]:
    """Reads a file, or all ``*.jsonl`` files of a directory tree, ordered by path.

    Raises:
        FileNotFoundError: If there is no such path, or no trace in the directory.
        TraceFileError: As `read_trace`.
        OSError: If a file cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path.absolute()} does not exist; give the directory that StepTrace has written to")
    if not path.is_dir():
        return [read_trace(path)]
    files = sorted(path.rglob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"no *.jsonl file in {path}; give the directory that StepTrace has written to")
    return [read_trace(file) for file in files]


def _parse_header(path: Path, line: bytes) -> Record:
    way_out = "give a file that StepTrace has written"
    try:
        header = json.loads(line)
    except ValueError:
        raise TraceFileError(path, 1, "the first line is not JSON", way_out) from None
    schema = header.get("schema") if isinstance(header, dict) else None
    if not isinstance(schema, str) or not schema.startswith(f"{SCHEMA_NAME}/"):
        raise TraceFileError(path, 1, f"the first line is no header of {SCHEMA_NAME}", way_out)
    version = schema.removeprefix(f"{SCHEMA_NAME}/")
    if version.isdecimal() and int(version) > SCHEMA_VERSION:
        raise TraceFileError(
            path,
            1,
            f"schema {schema!r} is newer than {SCHEMA_NAME}/{SCHEMA_VERSION}",
            "upgrade lightning-hpc to read it",
        )
    if version != str(SCHEMA_VERSION):
        raise TraceFileError(path, 1, f"schema {schema!r} is unknown", way_out)
    _require_keys(path, 1, header, "header")
    return dict(header)


def _parse(path: Path, number: int, line: bytes) -> Record:
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise TraceFileError(path, number, f"the line is not JSON ({error})", _REPAIR) from None
    kind = record.get("type") if isinstance(record, dict) else None
    if kind == "header" or not isinstance(kind, str) or kind not in _KEYS:
        raise TraceFileError(path, number, f"the line has the unknown type {kind!r}", _REPAIR)
    _require_keys(path, number, record, kind)
    return dict(record)


def _require_keys(path: Path, number: int, record: Record, kind: str) -> None:
    missing = [key for key in _KEYS[kind] if key not in record]
    if missing:
        raise TraceFileError(path, number, f"the {kind} lacks {', '.join(missing)}", _REPAIR)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_REPAIR = "the file was changed or damaged after it was written; delete this line to read the rest"
