"""The invariant: the index finds what `tarfile` finds, and neither shards nor a file that are not whole deceive it."""

import json
import os
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_hpc.data.shard_index import ShardIndex
from tests.data.shard_files import whole_shard, write_shard

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def samples_of(index: ShardIndex) -> list[dict[str, bytes | str]]:
    found = []
    for sample, shard, start, length in zip(range(len(index)), *index.spans(np.arange(len(index))), strict=True):
        found.append(index.unpack(sample, Path(index.paths[shard]).read_bytes()[start : start + length]))
    return found


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_samples_are_those_that_tarfile_finds(tmp_path: Path, form: int) -> None:
    generator = random.Random(form)
    long = 90 if form == tarfile.USTAR_FORMAT else 300  # ustar splits a path into 155 and 100 bytes
    paths: list[Path] = []
    expected: list[dict[str, Any]] = []
    for shard in range(4):
        members = []
        for sample in range(generator.randrange(1, 20)):
            folder = generator.choice(["", "train/", "f" * long + "/", "./", "v1.0/"])
            key = f"{folder}{sample:03d}{generator.choice(['', '-é', 'n' * (long - 10)])}"
            for field in generator.sample(["jpg", "cls", "seg.png", "json", "JPG.txt"], generator.randrange(1, 5)):
                members.append((f"{key}.{field}", os.urandom(generator.choice([0, 1, 511, 512, 513, 3000]))))
        paths.append(write_shard(tmp_path / f"{shard}.tar", members, form))
        with tarfile.open(paths[-1]) as tar:
            for member in tar:
                head, _, base = member.name.rpartition("/")
                stem, field = base.split(".", 1)
                key = f"{head}/{stem}" if head else stem
                if not expected or expected[-1]["__key__"] != key or expected[-1]["shard"] != shard:
                    expected.append({"__key__": key, "shard": shard})
                content = tar.extractfile(member)
                assert content is not None
                expected[-1][field.lower()] = content.read()
    index = ShardIndex.scan(paths)
    assert [{**sample, "shard": 0} for sample in samples_of(index)] == [{**sample, "shard": 0} for sample in expected]
    assert index.spans(np.arange(len(index)))[0] == [sample["shard"] for sample in expected]


def test_directories_and_files_that_are_no_fields_are_skipped(tmp_path: Path) -> None:
    for name in ("README", "d/.DS_Store", "d/a.jpg", "d/a.cls"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(name.encode())
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(tmp_path / "in", arcname=".")
    (sample,) = samples_of(ShardIndex.scan([path]))
    assert sample == {"__key__": "./d/a", "jpg": b"d/a.jpg", "cls": b"d/a.cls"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.jpg", "b.jpg", "a.cls"], r"member 'a\.cls': the key 'a' comes again"),
        (["a.jpg", "a.cls", "a.jpg"], r"member 'a\.jpg': the sample has this field already"),
        (["a.jpg", "a.JPG"], r"member 'a\.JPG': the sample has this field already"),
        (["a.__key__"], r"member 'a\.__key__': the sample has this field already"),
        (["README"], "holds no sample"),
        ([], "holds no sample"),
    ],
)
def test_names_that_form_no_samples_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    path = write_shard(tmp_path / "s.tar", [(name, b"1") for name in names])
    with pytest.raises(ValueError, match=message) as error:
        ShardIndex.scan([path])
    assert str(path) in str(error.value)


def test_a_key_may_be_in_several_shards(tmp_path: Path) -> None:
    paths = [write_shard(tmp_path / f"{shard}.tar", [("0.x", bytes([shard]))]) for shard in range(3)]
    assert samples_of(ShardIndex.scan(paths)) == [{"__key__": "0", "x": bytes([shard])} for shard in range(3)]


def test_a_shard_that_is_torn_or_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(whole_shard(path)[:-1024])
    with pytest.raises(ValueError, match=f"shard {path} ends at byte"):
        ShardIndex.scan([path])
    with pytest.raises(FileNotFoundError, match="missing"):
        ShardIndex.scan([tmp_path / "missing.tar"])


def make_index(folder: Path) -> tuple[list[Path], ShardIndex]:
    folder.mkdir(exist_ok=True)
    content = [[(f"{shard}-{key}.{field}", b"1" * key) for key in range(5) for field in "xy"] for shard in range(3)]
    paths = [write_shard(folder / f"{shard}.tar", members) for shard, members in enumerate(content)]
    return paths, ShardIndex.scan(paths)


def test_a_saved_index_gives_the_same_samples(tmp_path: Path) -> None:
    paths, index = make_index(tmp_path)
    index.save(tmp_path / "index")
    loaded = ShardIndex.load(tmp_path / "index", paths)
    assert loaded is not None
    assert samples_of(loaded) == samples_of(index)
    assert loaded.fingerprint == index.fingerprint
    assert loaded.paths == index.paths
    assert [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []


def test_a_saved_index_fits_only_the_shards_that_it_was_made_from(tmp_path: Path) -> None:
    paths, index = make_index(tmp_path)
    file = tmp_path / "index"
    assert ShardIndex.load(file, paths) is None
    index.save(file)
    for others in (paths[:2], paths[::-1], [*paths, paths[0]]):
        assert ShardIndex.load(file, others) is None
    os.utime(paths[1], ns=(0, 1))
    assert ShardIndex.load(file, paths) is None


def test_the_fingerprint_is_of_keys_and_shards_and_not_of_the_folder(tmp_path: Path) -> None:
    paths, index = make_index(tmp_path / "one")
    assert make_index(tmp_path / "two")[1].fingerprint == index.fingerprint
    assert ShardIndex.scan(paths[::-1]).fingerprint != index.fingerprint
    assert ShardIndex.scan(paths[:2]).fingerprint != index.fingerprint


def test_every_beginning_of_an_index_is_refused(tmp_path: Path) -> None:
    paths, index = make_index(tmp_path)
    file = tmp_path / "index"
    index.save(file)
    content = file.read_bytes()
    for cut in range(0, len(content), 41):
        file.write_bytes(content[:cut])
        with pytest.raises(ValueError, match=r"is not a whole index of shards .* delete it"):
            ShardIndex.load(file, paths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": {"offsets": 2**60}}, "announces other numbers"),
        ({"counts": {"offsets": -1}}, "announces other numbers"),
        ({"keys": 2**60}, "announces other numbers"),
        ({"counts": {"offsets": 29, "sizes": 31}}, "counts contradict each other"),
        ({"field_names": ["x"]}, "members without a name"),
        ({"paths": ["0.tar"]}, "another number of shards"),
        ({"format": "other"}, "it lacks"),
    ],
)
def test_an_index_with_a_false_first_line_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    paths, index = make_index(tmp_path)
    file = tmp_path / "index"
    index.save(file)
    first, _, rest = file.read_bytes().partition(b"\n")
    content = json.loads(first)
    counts = {**content["counts"], **change.get("counts", {})}
    file.write_bytes(json.dumps({**content, **change, "counts": counts}).encode() + b"\n" + rest)
    with pytest.raises(ValueError, match=message):
        ShardIndex.load(file, paths)


def test_an_index_with_false_numbers_is_refused_or_stays_in_its_shards(tmp_path: Path) -> None:
    paths, index = make_index(tmp_path)
    file = tmp_path / "index"
    index.save(file)
    content = file.read_bytes()
    start = content.index(b"\n") + 1
    generator = random.Random(0)
    for _ in range(60):
        place = start + 8 * generator.randrange((len(content) - start - len(index.keys)) // 8)
        number = generator.choice([-1, 2**62, -(2**62), generator.randrange(5000)])
        file.write_bytes(content[:place] + number.to_bytes(8, "little", signed=True) + content[place + 8 :])
        try:
            loaded = ShardIndex.load(file, paths)
        except ValueError:
            continue
        if loaded is not None:
            shards, starts, lengths = loaded.spans(np.arange(len(loaded)))
            for shard, begin, length in zip(shards, starts, lengths, strict=True):
                assert 0 <= begin <= begin + length <= paths[shard].stat().st_size
            assert all(fields["__key__"] is not None for fields in samples_of(loaded))
