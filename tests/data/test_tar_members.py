"""The invariant: in a whole tar the walk finds what `tarfile` finds, and a tar that is not whole is refused."""

import bz2
import gzip
import lzma
import os
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lightning_hpc.data.tar_members import members_of
from tests.data.shard_files import header, whole_shard, write_shard


def walk(path: Path) -> list[tuple[str, int, int]]:
    with path.open("rb") as file:
        return list(members_of(file.fileno(), str(path), path.stat().st_size))


@pytest.mark.parametrize(
    "form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["ustar", "gnu", "pax"]
)
def test_members_are_those_that_tarfile_finds(tmp_path: Path, form: int) -> None:
    generator = random.Random(form)
    long = 90 if form == tarfile.USTAR_FORMAT else 300  # ustar splits a path into 155 and 100 bytes
    members = [
        (f"{'d' * generator.randrange(1, long)}/{'é' * generator.randrange(1, long // 2)}.x", os.urandom(size))
        for size in (0, 1, 511, 512, 513, 3000)
        for _ in range(5)
    ]
    path = write_shard(tmp_path / "s.tar", members, form)
    with tarfile.open(path) as tar:
        expected = [(member.name, member.offset_data, member.size) for member in tar]
    assert [name for name, _, _ in expected] == [name for name, _ in members]
    assert walk(path) == expected


def test_every_beginning_of_a_tar_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    content = whole_shard(path)
    for cut in range(0, len(content) - 1024 + 512, 128):
        path.write_bytes(content[:cut])
        with pytest.raises(ValueError, match=str(path)):
            walk(path)
    path.write_bytes(content[:-512])  # one block of zeros is an end mark
    assert len(walk(path)) == 6


def test_a_changed_byte_of_a_header_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    content = whole_shard(path)
    for place in range(512, 1024, 11):  # the second header
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"s\.tar has no tar header at byte 512"):
            walk(path)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
@pytest.mark.parametrize("size", [9 * 2**30, 2**62, 2**80])
def test_an_absurd_size_is_refused_before_anything_is_allocated(tmp_path: Path, form: Any, size: int) -> None:
    info = tarfile.TarInfo("a.jpg")
    info.size = size
    path = tmp_path / "s.tar"
    path.write_bytes(info.tobuf(form) + bytes(2048))
    with pytest.raises(ValueError, match=rf"s\.tar, member 'a\.jpg' .* announces {size} bytes, but"):
        walk(path)


@pytest.mark.parametrize("size", [b"-0000000010\0", b"\xff" + b"\xfe" * 11, b"zzzzzzzzzzz\0"])
def test_a_size_that_is_no_size_is_refused(tmp_path: Path, size: bytes) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(header("a.jpg", tarfile.REGTYPE, size) + bytes(2048))
    with pytest.raises(ValueError, match=r"s\.tar, member 'a\.jpg' at byte 0: its header announces"):
        walk(path)


@pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g"])
def test_an_absurd_length_of_a_name_is_refused_though_the_file_has_that_many_bytes(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "s.tar"
    with path.open("wb") as file:
        file.write(header("name", kind, b"%011o\0" % 2**33))
        file.truncate(2**34)  # sparse: takes no space on the disk
    with pytest.raises(ValueError, match=rf"the extended header at byte 0 announces {2**33} bytes"):
        walk(path)


@pytest.mark.parametrize(
    "records",
    [
        b"nonsense",
        b"99 path=a.jpg\n",
        b"0 path=a.jpg\n",
        b"-5 path=a.jpg\n",
        b"16 size=12bytes\n",
        b"22 GNU.sparse.major=1\n",
    ],
)
def test_extended_attributes_that_cannot_be_read_are_refused(tmp_path: Path, records: bytes) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(header("pax", b"x", b"%011o\0" % len(records)) + records.ljust(512, b"\0") + bytes(1024))
    with pytest.raises(ValueError, match=r"s\.tar: the extended header at byte 0 cannot be read"):
        walk(path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE])
def test_links_and_special_files_are_refused(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(header("a.jpg", kind, b"%011o\0" % 0) + bytes(1024))
    with pytest.raises(ValueError, match=r"s\.tar, member 'a\.jpg' at byte 0: it is a link or a special file"):
        walk(path)


def test_files_that_are_no_whole_uncompressed_tar_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    content = whole_shard(path)
    for wrong, message in {
        gzip.compress(content): r"is compressed \(gzip\)",
        bz2.compress(content): r"is compressed \(bzip2\)",
        lzma.compress(content): r"is compressed \(xz\)",
        b"no tar" * 1000: "has no tar header at byte 0",
        content + content: "goes on after its end mark",
    }.items():
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=message):
            walk(path)
