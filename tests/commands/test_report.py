import json
import stat
from pathlib import Path

import pytest

from lightning_hpc.commands.report import main
from tests.report.run_traces import make_traces, write_traces


def test_a_run_gets_a_page_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_traces(
        tmp_path / "my_run" / "step_trace", [*make_traces("2 ranks"), *make_traces("2 ranks", attempt=1)]
    )
    main([str(run)])
    shown = capsys.readouterr().out
    assert "Diagnosis of 60 steps of 2 ranks: healthy" in shown
    assert str(run / "report.html") in shown
    assert "/my_run</h1>" in (run / "report.html").read_text()
    content = json.loads((run / "report.json").read_text())
    assert (content["attempt"], content["world_size"]) == (1, 2)
    assert stat.S_IMODE((run / "report.html").stat().st_mode) == 0o600


def test_a_file_and_another_directory(tmp_path: Path) -> None:
    run = write_traces(tmp_path / "run", make_traces())
    main([str(run / "attempt_000" / "rank_00000.jsonl"), "--output", str(tmp_path / "new" / "folder")])
    assert (tmp_path / "new" / "folder" / "report.html").is_file()
    main([str(run / "attempt_000" / "rank_00000.jsonl")])
    assert (run / "attempt_000" / "report.json").is_file()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; give the directory"),
        ("", "rank_00000.jsonl:1: the file has no whole line"),
        ("loss\n", "rank_00000.jsonl:1: the first line is not JSON"),
    ],
)
def test_bad_input_is_one_line_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    path = tmp_path / "attempt_000" / "rank_00000.jsonl"
    if content is not None:
        path.parent.mkdir()
        path.write_text(content)
    with pytest.raises(SystemExit) as error:
        main([str(path)])
    assert error.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_a_run_without_an_iteration_and_a_place_that_is_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trace,) = make_traces()
    run = write_traces(tmp_path / "run", [type(trace)(trace.path, trace.header, ())])
    with pytest.raises(SystemExit):
        main([str(run)])
    assert "no trace holds an iteration" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        main([str(write_traces(tmp_path / "other", make_traces())), "--output", str(tmp_path / "file")])
    assert "lightning-hpc report: " in capsys.readouterr().err
