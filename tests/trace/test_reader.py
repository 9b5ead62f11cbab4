import json
import os
from pathlib import Path

import pytest

from lightning_hpc.trace import TraceFileError, read_trace, read_traces
from lightning_hpc.trace.records import HEADER_KEYS, event_line, header_line, memory_line, span_line, step_line
from lightning_hpc.trace.timeline import Span

HEADER = header_line(
    **{key: 0 for key in HEADER_KEYS if key != "schema"} | {"host": "node", "clock": "host", "versions": {}}
)
SPAN = span_line(Span("startup", None, 0, 5), rank=0)
STEP = step_line(
    [1, 2, 3, 4, 5, 6],
    0,
    21,
    step=1,
    batch=0,
    epoch=0,
    rank=0,
    optimizer_steps=1,
    samples=4,
    start_ns=0,
    comm_bytes=0,
)
MEMORY = memory_line({}, step=1, epoch=0, batch=0, rank=0, at_ns=0)
EVENT = event_line("straggler", {}, step=1, rank=0, at_ns=0)


def write(path: Path, *lines: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(lines))
    return path


def test_reads_header_steps_and_spans(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.jsonl", HEADER, SPAN, STEP, STEP, MEMORY, EVENT))
    assert trace.header["schema"] == "lightning_hpc.trace/1"
    assert [record["type"] for record in trace.records] == ["span", "step", "step", "memory", "event"]
    assert len(trace.steps) == 2
    assert [span["name"] for span in trace.spans] == ["startup"]
    assert (len(trace.memory), len(trace.events)) == (1, 1)


@pytest.mark.parametrize("length", [1, 10, len(STEP) - 1])
def test_a_torn_last_line_is_left_out(tmp_path: Path, length: int) -> None:
    trace = read_trace(write(tmp_path / "a.jsonl", HEADER, STEP, STEP[:length]))
    assert len(trace.records) == 1


def test_reads_a_directory_tree_in_order(tmp_path: Path) -> None:
    for name in ("attempt_001/rank_00000", "attempt_000/rank_00001", "attempt_000/rank_00000"):
        write(tmp_path / f"{name}.jsonl", HEADER, STEP)
    names = [str(trace.path.relative_to(tmp_path).with_suffix("")) for trace in read_traces(tmp_path)]
    assert names == ["attempt_000/rank_00000", "attempt_000/rank_00001", "attempt_001/rank_00000"]
    assert len(read_traces(tmp_path / "attempt_000" / "rank_00001.jsonl")) == 1


def without(line: bytes, key: str) -> bytes:
    record = json.loads(line)
    del record[key]
    return json.dumps(record).encode() + b"\n"


NEWER = HEADER.replace(b"trace/1", b"trace/2")
BAD_FILES = {
    "empty": ([], "a.jsonl:1: the file has no whole line; .* delete the file"),
    "torn header": ([HEADER[:20]], "a.jsonl:1: the file has no whole line; give a file that StepTrace has written"),
    "text": ([b"loss,step\n1,2\n"], "a.jsonl:1: the first line is not JSON; give a file that StepTrace has written"),
    "deep": ([b"[" * 200_000 + b"\n"], "a.jsonl:1: the first line is not JSON; give a file"),
    "deep line": ([HEADER, b"[" * 200_000 + b"\n"], "a.jsonl:2: the line is (not JSON|nested too deeply)"),
    "huge number": ([HEADER, STEP.replace(b"0.000001", b"1" * 9999)], "a.jsonl:2: the line is not JSON"),
    "deep details": (
        [HEADER, EVENT.replace(b"{}", b'{"a":' + b"[" * 900 + b"]" * 900 + b"}")],
        "a.jsonl:2: details is .*, which is no object, or one that is nested too deeply",
    ),
    "text for a time": ([HEADER, STEP, STEP.replace(b"0.000001", b'"x"')], "a.jsonl:3: data_prep_ms is 'x', which is"),
    "binary": ([b"\x80\xff\x00\n"], "a.jsonl:1: the first line is not JSON; give a file that StepTrace"),
    "other JSON": ([b'{"loss": 1}\n'], "a.jsonl:1: the first line is no header of lightning_hpc.trace; give"),
    "list": ([b"[1]\n"], "a.jsonl:1: the first line is no header of lightning_hpc.trace; give"),
    "no header": ([STEP, STEP], "a.jsonl:1: the first line is no header of lightning_hpc.trace; give"),
    "newer": ([NEWER, b'{"type":"new"}\n'], "a.jsonl:1: schema 'lightning_hpc.trace/2' is newer than .*/1; upgrade"),
    "unknown schema": (
        [HEADER.replace(b"trace/1", b"trace/x")],
        "a.jsonl:1: schema 'lightning_hpc.trace/x' is unknown",
    ),
    "header lacks": ([without(HEADER, "rank"), STEP], "a.jsonl:1: the header lacks rank; "),
    "bad line": ([HEADER, STEP, b"{oops}\n", STEP], "a.jsonl:3: the line is not JSON .*; .*delete this line"),
    "bad last line": ([HEADER, STEP, b'{"type"\n'], "a.jsonl:3: the line is not JSON .*; .*delete this line"),
    "blank line": ([HEADER, b"\n", STEP], "a.jsonl:2: the line is not JSON .*; .*delete this line"),
    "two lines in one": ([HEADER, STEP[:-1] + STEP], "a.jsonl:2: the line is not JSON .*; .*delete this line"),
    "NaN": ([HEADER, STEP.replace(b"0.000001", b"NaN")], "a.jsonl:2: the line is not JSON .NaN is no number.; "),
    "unknown type": ([HEADER, b'{"type":"x"}\n'], "a.jsonl:2: the line has the unknown type 'x'; "),
    "second header": ([HEADER, HEADER], "a.jsonl:2: the line has the unknown type 'header'; "),
    "type is a list": ([HEADER, b'{"type":[]}\n'], r"a.jsonl:2: the line has the unknown type \[\]; "),
    "no object": ([HEADER, b"3\n"], "a.jsonl:2: the line has the unknown type None; "),
    "step lacks": ([HEADER, without(STEP, "total_ms")], "a.jsonl:2: the step lacks total_ms; .*delete this line"),
    "span lacks": ([HEADER, without(SPAN, "name")], "a.jsonl:2: the span lacks name; .*delete this line"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_an_error_that_names_file_line_and_way_out(tmp_path: Path, case: str) -> None:
    lines, message = BAD_FILES[case]
    with pytest.raises(TraceFileError, match=message):
        read_trace(write(tmp_path / "a.jsonl", *lines))


def test_no_trace_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \*\.jsonl file in .*; give the directory"):
        read_traces(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_traces(tmp_path / "missing")


@pytest.mark.parametrize("kind", ["fifo", "directory", "large"])
def test_what_is_no_file_of_a_trace_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 2**31)
    message = "2,147,483,648 bytes; at most" if kind == "large" else "this is no regular file; give a file"
    with pytest.raises(TraceFileError, match=f"a.jsonl:1: .*{message}"):
        read_trace(path)
    with pytest.raises(TraceFileError, match=message):
        read_traces(tmp_path)


def test_an_empty_file_among_others_is_a_rank_that_had_not_begun(tmp_path: Path) -> None:
    write(tmp_path / "rank_00000.jsonl", HEADER, STEP)
    write(tmp_path / "rank_00001.jsonl")
    assert [trace.path.name for trace in read_traces(tmp_path)] == ["rank_00000.jsonl"]
