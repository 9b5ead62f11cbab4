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
from lightning_hpc.trace.values import problem_of

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
        TraceFileError: If the file is empty, larger than 1 GiB, no trace or no file at all, has a newer schema, or has
            a bad line that is not torn, or a figure that is none.
        OSError: If it cannot be read.
    """
    path = Path(path)
    if not path.is_file() and path.exists():  # to open a pipe would wait for somebody to write into it
        raise TraceFileError(path, 1, "this is no regular file", _GIVE)
    size = path.stat().st_size
    if size > _MAX_FILE_BYTES:
        raise TraceFileError(path, 1, f"the file has {size:,} bytes", f"at most {_MAX_FILE_BYTES:,} are read")
    lines = path.read_bytes().split(b"\n")
    # A whole line ends with a newline, so what follows the last one is nothing, or torn.
    del lines[-1]
    if not lines:
        way_out = _GIVE if size else "its run ended before it began; delete the file"
        raise TraceFileError(path, 1, "the file has no whole line", way_out)
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
    return [read_trace(file) for file in trace_files(path)]


def trace_files(path: str | Path) -> list[Path]:
    """The file itself, or all ``*.jsonl`` files of a directory tree, ordered by path.

    Empty ones, of ranks that were killed before they had begun, only if there are no others.

    Raises:
        FileNotFoundError: If there is no such path, or no trace in the directory.
        OSError: If a directory cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path.absolute()} does not exist; give the directory that StepTrace has written to")
    if not path.is_dir():
        return [path]
    files = sorted(path.rglob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"no *.jsonl file in {path}; give the directory that StepTrace has written to")
    return [file for file in files if file.stat().st_size or not file.is_file()] or files


def _parse_header(path: Path, line: bytes) -> Record:
    try:
        header = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise TraceFileError(path, 1, "the first line is not JSON", _GIVE) from None
    schema = header.get("schema") if isinstance(header, dict) else None
    if not isinstance(schema, str) or not schema.startswith(f"{SCHEMA_NAME}/"):
        raise TraceFileError(path, 1, f"the first line is no header of {SCHEMA_NAME}", _GIVE)
    version = schema.removeprefix(f"{SCHEMA_NAME}/")
    if version.isdecimal() and int(version) > SCHEMA_VERSION:
        raise TraceFileError(
            path,
            1,
            f"schema {schema!r} is newer than {SCHEMA_NAME}/{SCHEMA_VERSION}",
            "upgrade lightning-hpc to read it",
        )
    if version != str(SCHEMA_VERSION):
        raise TraceFileError(path, 1, f"schema {schema!r} is unknown", _GIVE)
    _check(path, 1, header, "header")
    return dict(header)


def _parse(path: Path, number: int, line: bytes) -> Record:
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise TraceFileError(path, number, f"the line is not JSON ({error})", _REPAIR) from None
    except RecursionError:
        raise TraceFileError(path, number, "the line is nested too deeply to be a record", _REPAIR) from None
    kind = record.get("type") if isinstance(record, dict) else None
    if kind == "header" or not isinstance(kind, str) or kind not in _KEYS:
        raise TraceFileError(path, number, f"the line has the unknown type {kind!r}", _REPAIR)
    _check(path, number, record, kind)
    return dict(record)


def _check(path: Path, number: int, record: Record, kind: str) -> None:
    missing = [key for key in _KEYS[kind] if key not in record]
    problem = f"the {kind} lacks {', '.join(missing)}" if missing else problem_of(record, kind)
    if problem is not None:
        raise TraceFileError(path, number, problem, _REPAIR)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_MAX_FILE_BYTES = 2**30
_GIVE = "give a file that StepTrace has written"
_REPAIR = "the file was changed or damaged after it was written; delete this line to read the rest"
