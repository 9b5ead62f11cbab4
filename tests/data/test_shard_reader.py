"""The invariant: what is read is what lies in the shard, and a shard that is not what was indexed is an error."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from lightning_hpc.data.shard_index import ShardIndex
from lightning_hpc.data.shard_reader import ShardReader
from tests.data.shard_files import write_shards


def read_all(index: ShardIndex) -> list[tuple[int, bytes]]:
    """Content by number, in an order that goes to and fro between the shards."""
    with closing(ShardReader(index)) as reader:
        return list(reader.read_each(np.random.default_rng(3).permutation(len(index))))


def test_any_order_reads_what_lies_in_the_shards(tmp_path: Path) -> None:
    index = ShardIndex.scan(write_shards(tmp_path, [7, 1, 12, 5]))
    found = dict(read_all(index))
    assert sorted(found) == list(range(25))
    for sample, (shard, start, length) in enumerate(zip(*index.spans(np.arange(25)), strict=True)):
        assert found[sample] == Path(index.paths[shard]).read_bytes()[start : start + length]
        assert index.unpack(sample, found[sample])["n"] == b"%d" % sample


@pytest.mark.parametrize("change", [lambda size: size - 1024, lambda size: 0, lambda size: size + 512])
def test_a_shard_that_has_changed_is_an_error(tmp_path: Path, change: Callable[[int], int]) -> None:
    (path,) = write_shards(tmp_path, [5])
    index = ShardIndex.scan([path])
    os.truncate(path, change(path.stat().st_size))
    with pytest.raises(ValueError, match=f"shard {path} does not have the"):
        read_all(index)


def test_a_shard_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, [5])
    with closing(ShardReader(ShardIndex.scan([path]))) as reader:
        reader.read(0)
        os.truncate(path, 1024)
        with pytest.raises(ValueError, match=f"shard {path} does not have the"):
            reader.read(4)


def test_a_read_that_fails_names_the_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: int) -> bytes:
        raise OSError(5, "Input/output error")

    (path,) = write_shards(tmp_path, [5])
    index = ShardIndex.scan([path])
    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(OSError, match=str(path)):
        read_all(index)


def test_a_short_read_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, read = ShardIndex.scan(write_shards(tmp_path, [5, 6])), os.pread
    expected = read_all(index)
    monkeypatch.setattr(os, "pread", lambda descriptor, length, offset: read(descriptor, min(length, 7), offset))
    assert read_all(index) == expected
