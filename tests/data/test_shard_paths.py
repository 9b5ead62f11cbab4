"""Which paths a pattern stands for, and what is no list of shards."""

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_hpc.data.shard_paths import find_shards


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    for number in range(5):
        (tmp_path / f"train-{number:03d}.tar").touch()
    return [str(tmp_path / f"train-{number:03d}.tar") for number in range(5)]


def test_patterns_find_shards(names: list[str], tmp_path: Path) -> None:
    for pattern, expected in {
        f"{tmp_path}/train-*.tar": names,
        f"{tmp_path}/train-00[13].tar": [names[1], names[3]],
        f"{tmp_path}/train-{{001..003}}.tar": names[1:4],
        f"{tmp_path}/{{train}}-00{{4,0}}.tar": [names[4], names[0]],
        names[2]: [names[2]],
    }.items():
        assert find_shards(pattern) == expected


def test_paths_stay_in_their_order(names: list[str]) -> None:
    assert find_shards([names[3], Path(names[1])]) == [names[3], names[1]]
    assert find_shards(Path(names[1])) == [names[1]]


def test_a_file_whose_name_looks_like_a_pattern_is_found(tmp_path: Path) -> None:
    path = tmp_path / "odd[1]{2}.tar"
    path.touch()
    assert find_shards(str(path)) == [str(path)]


def test_a_shard_that_is_listed_twice_is_refused(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(names[0]).parent)
    with pytest.raises(ValueError, match=r"train-000\.tar is listed 2 times"):
        find_shards([names[0], "train-000.tar"])


def test_no_shards_are_refused(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no shard fits '.*/test-\*\.tar'"):
        find_shards(f"{tmp_path}/test-*.tar")
    with pytest.raises(FileNotFoundError, match=r"no shard fits '.*/train-005\.tar'"):
        find_shards(f"{tmp_path}/train-{{000..005}}.tar")
    with pytest.raises(ValueError, match=r"shards=\[\] stands for no path"):
        find_shards([])
    with pytest.raises(ValueError, match=r"\{3\.\.1\} counts down; write \{1\.\.3\}"):
        find_shards(f"{tmp_path}/train-{{3..1}}.tar")
    with pytest.raises(IsADirectoryError, match=r"is a folder; write '.*/\*\.tar'"):
        find_shards([tmp_path])


@pytest.mark.parametrize("wrong", [3, [3], None])
def test_what_is_no_path_is_quoted(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"shards={re.escape(repr(wrong))} must be a pattern, or a list of paths"):
        find_shards(wrong)
