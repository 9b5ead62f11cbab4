import json
from pathlib import Path

import numpy as np
import pytest

from lightning_hpc.commands.compare import main
from tests.report.runs import Noise, make_times, write_trace
from tests.report.soak_comparison import ALL_PHASES


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs each of ``main``, of ``same`` and of ``slow``, in turns."""
    folder = tmp_path_factory.mktemp("runs")
    for kind, name in enumerate(("main", "same", "slow")):
        for number in range(3):
            generator = np.random.default_rng([kind, number])
            times = make_times(generator, 300, Noise(), ALL_PHASES if name == "slow" else None)
            path = folder / name / str(number) / "attempt_000" / "rank_00000.jsonl"
            write_trace(path, times, started_at=3 * number + kind)
    return folder


def status(arguments: list[str | Path]) -> int:
    """The exit status."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_status_0_for_equal_runs_and_1_for_slower_ones(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status([runs / "main", runs / "same"]) == 0
    assert capsys.readouterr().out.startswith("no difference: the step")
    assert status([runs / "main", runs / "slow"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("regression: the step +")
    for text in ("step, median", "forward", "steps/s", "3 runs of 900 steps in all as base"):
        assert text in shown
    assert status([runs / "main", runs / "slow", "--threshold", "20"]) == 0


def test_the_files_it_writes(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "c.md", tmp_path / "c.json"]
    assert status([runs / "main", runs / "slow", "--markdown", files[0], "--output", files[1]]) == 1
    assert files[0].read_text().startswith("**lightning-hpc compare: regression**: ")
    assert json.loads(files[1].read_text())["is_regression"] is True
    assert f"wrote {files[0]}" in capsys.readouterr().err
    assert status([runs / "main", runs / "slow", "--markdown", "-"]) == 1
    assert capsys.readouterr().out == files[0].read_text()


def test_a_baseline_stands_for_its_runs(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "benchmarks" / "baselines" / "main.json"
    assert status(["--save-baseline", file, runs / "main"]) == 0
    assert capsys.readouterr().out == f"wrote {file}: 3 runs\n"
    assert status([file, runs / "same"]) == 0
    assert status([file, runs / "slow"]) == 1
    assert status([file, file]) == 0
    assert status([file, runs / "slow", "--skip", "50"]) == 2
    assert "leaves out the first 20 steps" in capsys.readouterr().err


def test_different_numbers_of_ranks_are_refused(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "rank_00000.jsonl", make_times(np.random.default_rng(0), 300, Noise()), world_size=2)
    assert status([runs / "main", tmp_path]) == 2
    assert "has 1 ranks and" in capsys.readouterr().err


def test_too_few_steps_are_said_and_no_regression(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "rank_00000.jsonl", make_times(np.random.default_rng(0), 50, Noise()))
    assert status([runs / "main", tmp_path]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("too few steps to tell")
    assert "50 steps after the first 20, of 100 needed; left out" in shown
    assert status(["--save-baseline", tmp_path / "b.json", tmp_path]) == 2


STEP = '{"type":"step","step":1}\n'
BAD_FILES = {
    "empty": ("", "x.jsonl:1: the file has no whole line"),
    "truncated": ('{"type":"header","schema":"lightning_hpc.tr', "x.jsonl:1: the file has no whole line"),
    "foreign": ("loss,step\n1,2\n", "x.jsonl:1: the first line is not JSON"),
    "newer": ('{"schema":"lightning_hpc.trace/2"}\n', "x.jsonl:1: schema 'lightning_hpc.trace/2' is newer"),
}


@pytest.mark.parametrize("case", BAD_FILES)
@pytest.mark.parametrize("side", [0, 1])
def test_a_bad_trace_is_status_2_with_file_and_line(
    runs: Path, tmp_path: Path, case: str, side: int, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = BAD_FILES[case]
    file = tmp_path / "x.jsonl"
    file.write_text(content)
    paths = [runs / "main", runs / "main"]
    paths[side] = tmp_path
    assert status(list(paths)) == 2
    assert f"lightning-hpc compare: {tmp_path}/{message}" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema":"lightning_hpc.baseline/9"}', "\x00"])
def test_a_bad_baseline_is_status_2_with_file_and_line(
    runs: Path, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.json").write_text(content)
    assert status([tmp_path / "b.json", runs / "main"]) == 2
    assert f"{tmp_path}/b.json:1: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "it takes BASE and NEW, and was given 1 paths"),
        (["a", "b", "c"], "was given 3 paths"),
        (["a", "b"], "a does not exist; give the directory that StepTrace has written to"),
        (["a.json", "b"], "No such file or directory"),
        (["a", "b", "--confidence", "1"], "a confidence of 1.0 is not from 0.5 to below 1"),
        (["a", "b", "--threshold", "-1"], "threshold"),
        (["a", "b", "--markdown", "no/such/folder/c.md"], "no/such/folder must be a folder"),
        (["a", "--save-baseline", "b.txt"], "its name must end with .json"),
        (["a", "--save-baseline", "b.json", "--markdown", "-"], "leave them out"),
        (["a", "b", "--no-such-option"], "no-such-option"),
    ],
)
def test_bad_arguments_are_status_2(
    arguments: list[str | Path], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(arguments) == 2
    assert message in capsys.readouterr().err


def test_help_explains_each_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for explanation in ("Exit status: 0", "smallest growth of the step", "of the intervals", "first steps of each run"):
        assert explanation in text
