"""Tar shards, whole and faulty, for the tests of what reads them."""

import io
import itertools
import os
import tarfile
from pathlib import Path


def write_shard(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_shards(folder: Path, counts: list[int], size: int = 40) -> list[Path]:
    """Shards whose samples are numbered through: the key is the number, and so is the field ``n``."""
    folder.mkdir(exist_ok=True)
    number = itertools.count()
    paths = []
    for shard, count in enumerate(counts):
        members = []
        for key in itertools.islice(number, count):
            members += [(f"{key}.n", b"%d" % key), (f"{key}.x", bytes([key % 251]) * (key % size))]
        paths.append(write_shard(folder / f"train-{shard:03d}.tar", members, tarfile.DEFAULT_FORMAT))
    return paths


def whole_shard(path: Path) -> bytes:
    """Three samples of two members, contents of several sizes; the last two blocks are the end mark."""
    members = [
        (f"{key}.{field}", os.urandom(size)) for key, size in (("a", 0), ("b", 512), ("c", 700)) for field in "xy"
    ]
    content = write_shard(path, members).read_bytes()
    end = max(index for index, byte in enumerate(content) if byte)  # the last byte of c.y may be zero, hence the field
    return content[: -(-(end + 1) // 512) * 512 + 1024]


def header(name: str, kind: bytes, size: bytes) -> bytes:
    """A header as `tarfile` would not write it, with the right checksum."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    block[124:136], block[156:157], block[148:156] = size, kind, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)
