"""What lies where in tar shards of the WebDataset layout, found by reading their headers once.

Reading all headers takes a thousand times as long as reading a finished index, so that an index can be kept in a file:
a line of JSON and then the arrays as they are, nothing that would have to be unpickled.
"""

import json
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from lightning_hpc.data.tar_members import members_of

Sample: TypeAlias = dict[str, bytes | str]
"""The content of each member by its extension, and the key as text under ``__key__``."""

_Integers: TypeAlias = NDArray[np.int64]

_FORMAT = "lightning_hpc.shard_index/1"
_ARRAYS = ("file_sizes", "mtimes_ns", "samples", "members", "offsets", "sizes", "fields", "key_ends")


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The samples of a list of tar shards, numbered in the order of the list and, in a shard, of the file.

    Members that share the path up to the first dot of the base name form one sample; what follows the dot, in lower
    case, is the name of the field: ``a/b.seg.png`` is the field ``seg.png`` of the sample ``a/b``. Directories, and
    files with no dot or nothing before it (``README``, ``.DS_Store``), belong to no sample and are skipped.

    Everything is in a few arrays, about 80 bytes for a sample of two members: forked workers share them, and they
    pickle at the speed of a copy.

    Attributes:
        paths: The shards.
        file_sizes: int64 ``[shards]``: bytes of each.
        mtimes_ns: int64 ``[shards]``: when each was last written, in nanoseconds since 1970.
        samples: int64 ``[shards + 1]``: the first sample of each shard, and the number of all samples.
        members: int64 ``[samples + 1]``: the first member of each sample, and the number of all members.
        offsets: int64 ``[members]``: where the content of each begins in its shard, in bytes.
        sizes: int64 ``[members]``: bytes of each.
        fields: int64 ``[members]``: index of each one's name in ``field_names``.
        field_names: All names of fields.
        keys: The keys of all samples, one after the other, in UTF-8.
        key_ends: int64 ``[samples + 1]``: 0, and where each key ends.
    """

    paths: tuple[str, ...]
    file_sizes: _Integers
    mtimes_ns: _Integers
    samples: _Integers
    members: _Integers
    offsets: _Integers
    sizes: _Integers
    fields: _Integers
    field_names: tuple[str, ...]
    keys: bytes
    key_ends: _Integers

    @classmethod
    def scan(cls, paths: Sequence[str | Path]) -> Self:
        """Reads all headers.

        Raises:
            OSError: If a shard cannot be read.
            ValueError: If a shard is no uncompressed tar, is torn or damaged, holds links or other things that are no
                plain files, holds no sample, or holds a key twice. The message names shard and member.
        """
        builder = _Builder()
        for path in paths:
            builder.add(os.fspath(path))
        return cls(
            paths=tuple(os.fspath(path) for path in paths),
            field_names=tuple(builder.field_names),
            keys=bytes(builder.keys),
            **{name: np.array(getattr(builder, name), dtype=np.int64) for name in _ARRAYS},
        )

    @classmethod
    def load(cls, file: str | Path, paths: Sequence[str | Path]) -> Self | None:
        """Reads what `save` wrote, if it is about these shards.

        Returns:
            The index; None if there is no such file, or if the shards have other names (without their folder), other
            sizes or another time of modification than when they were scanned.

        Raises:
            OSError: If the file or a shard cannot be read.
            ValueError: If the file is no index, or is torn.
        """
        if not Path(file).exists():
            return None
        try:
            index = cls(**_read(Path(file)))
            index._check()
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file} is not a whole index of shards ({error!r}); delete it, it is made again"
            ) from error
        status = [Path(path).stat() for path in paths]
        fits = (
            [Path(path).name for path in paths] == list(index.paths)
            and [entry.st_size for entry in status] == index.file_sizes.tolist()
            and [entry.st_mtime_ns for entry in status] == index.mtimes_ns.tolist()
        )
        return replace(index, paths=tuple(os.fspath(path) for path in paths)) if fits else None

    def save(self, file: str | Path) -> None:
        """Writes the index, so that readers find the old file or the new one, never half of it."""
        header = {
            "format": _FORMAT,
            "paths": [Path(path).name for path in self.paths],
            "field_names": self.field_names,
            "counts": {name: len(getattr(self, name)) for name in _ARRAYS},
            "keys": len(self.keys),
        }
        target = Path(file)
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
        try:
            with unfinished.open("wb") as stream:
                stream.write(json.dumps(header).encode() + b"\n")
                for name in _ARRAYS:
                    stream.write(getattr(self, name).astype("<i8").tobytes())
                stream.write(self.keys)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.members) - 1

    @cached_property
    def fingerprint(self) -> int:
        """A checksum of all keys and of the number of samples in each shard; the folder does not count."""
        return zlib.crc32(self.samples.astype("<i8").tobytes(), zlib.crc32(self.keys))

    def spans(self, samples: _Integers) -> tuple[list[int], list[int], list[int]]:
        """Shard, first byte and number of bytes of each sample, from its first member to the end of its last."""
        first, last = self.members[samples], self.members[samples + 1] - 1
        starts = self.offsets[first]
        lengths = self.offsets[last] + self.sizes[last] - starts
        shards = np.searchsorted(self.samples, samples, side="right") - 1
        return shards.tolist(), starts.tolist(), lengths.tolist()

    def key(self, sample: int) -> str:
        """The key of a sample."""
        return self.keys[self.key_ends[sample] : self.key_ends[sample + 1]].decode("utf-8", "surrogateescape")

    def unpack(self, sample: int, content: bytes) -> Sample:
        """Cuts what lies in a sample's span into its members."""
        run = slice(self.members[sample], self.members[sample + 1])
        starts = (self.offsets[run] - self.offsets[run.start]).tolist()
        fields: Sample = {"__key__": self.key(sample)}
        for field, start, size in zip(self.fields[run].tolist(), starts, self.sizes[run].tolist(), strict=True):
            fields[self.field_names[field]] = content[start : start + size]
        return fields

    def _check(self) -> None:
        """Raises unless the numbers can be those of a scan, so that nothing outside a shard is ever asked for."""
        for ends, count in (
            (self.samples, len(self)),
            (self.members, len(self.offsets)),
            (self.key_ends, len(self.keys)),
        ):
            if not len(ends) or ends[0] != 0 or ends[-1] != count or (np.diff(ends) < 0).any():
                raise ValueError("its counts contradict each other")
        if not len(self.paths) == len(self.file_sizes) == len(self.mtimes_ns) == len(self.samples) - 1:
            raise ValueError("it has figures for another number of shards")
        if not len(self.offsets) == len(self.sizes) == len(self.fields) or len(self.key_ends) != len(self.members):
            raise ValueError("it has figures for another number of members")
        named = (self.fields >= 0) & (self.fields < len(self.field_names))
        if (np.diff(self.members) < 1).any() or not named.all():
            raise ValueError("it has samples without members, or members without a name")
        limits = np.repeat(self.file_sizes, np.diff(self.members[self.samples]))
        outside = (self.offsets < 0) | (self.sizes < 0) | (self.sizes > limits - self.offsets)
        backwards = self.offsets[self.members[1:] - 1] < self.offsets[self.members[:-1]]
        if outside.any() or backwards.any():
            raise ValueError("it has members outside of their shard, or of their sample")


def _read(file: Path) -> dict[str, Any]:
    """The attributes of an index, with no more memory than the file has bytes."""
    with file.open("rb") as stream:
        header = json.loads(stream.readline())
        if not isinstance(header, dict) or header.get("format") != _FORMAT:
            raise ValueError(f'it lacks "format": "{_FORMAT}"')
        content = stream.read()
    counts = [int(header["counts"][name]) for name in _ARRAYS]
    if min(counts) < 0 or len(content) != 8 * sum(counts) + int(header["keys"]):
        raise ValueError(f"{len(content)} bytes follow its first line, which announces other numbers")
    numbers = np.frombuffer(content, dtype="<i8", count=sum(counts)).astype(np.int64)
    arrays = np.split(numbers, np.cumsum(counts)[:-1])
    return {
        **dict(zip(_ARRAYS, arrays, strict=True)),
        "paths": tuple(str(path) for path in header["paths"]),
        "field_names": tuple(str(name) for name in header["field_names"]),
        "keys": content[8 * sum(counts) :],
    }


class _Builder:
    """Gathers members into samples. Its attributes are those of the index, as they grow."""

    def __init__(self) -> None:
        self.file_sizes, self.mtimes_ns = array("q"), array("q")
        self.samples, self.members, self.key_ends = array("q", [0]), array("q", [0]), array("q", [0])
        self.offsets, self.sizes, self.fields = array("q"), array("q"), array("q")
        self.field_names: dict[str, int] = {}
        self.keys = bytearray()

    def add(self, path: str) -> None:
        """Reads the headers of one shard."""
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - unbuffered: one small read for each header
            status = os.fstat(file.fileno())
            self.file_sizes.append(status.st_size)
            self.mtimes_ns.append(status.st_mtime_ns)
            self._gather(path, members_of(file.fileno(), path, status.st_size))
        if len(self.members) - 1 == self.samples[-1]:
            raise ValueError(f"shard {path} holds no sample: no file in it has a name of the form key.extension")
        self.samples.append(len(self.members) - 1)

    def _gather(self, path: str, members: Iterator[tuple[str, int, int]]) -> None:
        seen: set[str] = set()
        current, fields = "", set[int]()
        for name, offset, size in members:
            folder, slash, base = name.rpartition("/")
            stem, dot, extension = base.partition(".")
            if not stem or not dot:
                continue
            key = folder + slash + stem
            if key != current or not fields:
                if key in seen:
                    raise ValueError(
                        f"shard {path}, member {name!r}: the key {key!r} comes again after other samples;"
                        " the members of a sample must follow each other, and a key must be unique in its shard"
                    )
                if fields:
                    self._close(current)
                seen.add(key)
                current, fields = key, set()
            field = self.field_names.setdefault(extension.lower(), len(self.field_names))
            if field in fields or extension == "__key__":
                raise ValueError(f"shard {path}, member {name!r}: the sample has this field already; rename the member")
            fields.add(field)
            self.offsets.append(offset)
            self.sizes.append(size)
            self.fields.append(field)
        if fields:
            self._close(current)

    def _close(self, key: str) -> None:
        self.keys += key.encode("utf-8", "surrogateescape")
        self.key_ends.append(len(self.keys))
        self.members.append(len(self.offsets))
