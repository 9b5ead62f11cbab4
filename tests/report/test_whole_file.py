import errno
import stat
from pathlib import Path

import pytest

from lightning_hpc.report.whole_file import whole_file, write_whole


def test_a_file_is_replaced_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")
    with whole_file(path) as file:
        file.write(b"after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    write_whole(path, "half a character: \ud83d", is_private=True)
    assert path.read_text() == "half a character: ?"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("planted")])
def test_an_error_leaves_the_file_of_before_and_nothing_else(tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")

    def write() -> None:
        with whole_file(path) as file:
            file.write(b"after")
            raise error

    with pytest.raises(type(error)) as raised:
        write()
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
    if isinstance(error, OSError):
        assert str(raised.value) == f"[Errno 28] No space left on device: '{path}'"


def test_an_error_of_another_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"other\.txt"), whole_file(tmp_path / "a.json"):
        (tmp_path / "other.txt").read_text()
    with pytest.raises(FileNotFoundError, match=r"no/a\.json'$"):
        write_whole(tmp_path / "no" / "a.json", "")


def test_a_link_stays_one_and_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"
    write_whole(Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()
