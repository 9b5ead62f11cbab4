import os
from pathlib import Path

import pytest

from lightning_hpc.trace.writer import TraceWriter


def test_each_line_is_in_the_file_at_once_and_only_the_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.jsonl"
    writer = TraceWriter(path, b"header\n")
    assert path.read_bytes() == b"header\n"
    writer.write(b"first\n")
    assert path.read_bytes() == b"header\nfirst\n"
    assert path.stat().st_mode & 0o777 == 0o600
    writer.close()


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.jsonl"
    path.write_bytes(b"history\n")
    with pytest.raises(FileExistsError):
        TraceWriter(path, b"header\n")
    assert path.read_bytes() == b"history\n"


def test_one_write_a_line_and_a_short_one_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(tmp_path / "rank_00000.jsonl", b"header\n")
    writes: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda descriptor, line: writes.append(line) or 3)
    with pytest.raises(OSError, match=r"only 3 of 6 bytes were written: .*rank_00000.jsonl"):
        writer.write(b"first\n")
    assert writes == [b"first\n"]
