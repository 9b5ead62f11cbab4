import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_hpc.report.baseline import MAX_BASELINE_RUNS, read_baseline, save_baseline
from lightning_hpc.report.comparison import compare_runs
from lightning_hpc.report.side import Side
from lightning_hpc.trace import TraceFileError
from tests.report.runs import SKIP, Noise, make_sides

ENVIRONMENT = {"world_size": 1, "hosts": ["a"], "clocks": ["host"], "versions": ["torch 2"]}


def side(runs: int = 3, seed: int = 0) -> Side:
    base, _ = make_sides(np.random.default_rng(seed), runs, 400, Noise())
    return Side("runs", tuple(base), ENVIRONMENT)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_baseline(tmp_path / "b.json", side(), SKIP)
    return tmp_path / "b.json"


def test_a_baseline_compares_as_its_runs_do(saved: Path) -> None:
    read, skip = read_baseline(saved)
    assert skip == SKIP
    assert dict(read.environment) == ENVIRONMENT
    assert [run.started_at for run in read.runs] == [run.started_at for run in side().runs]
    _, new = make_sides(np.random.default_rng(1), 3, 400, Noise())
    direct, kept = (compare_runs(runs, new).total.median for runs in (side().runs, read.runs))
    assert direct is not None
    assert kept is not None
    assert kept.ratio == pytest.approx(direct.ratio, rel=1e-3)
    assert kept.high == pytest.approx(direct.high, rel=2e-3)


def test_the_figures_of_the_median_run_are_there_to_read(saved: Path) -> None:
    content = json.loads(saved.read_text())
    assert content["schema"] == "lightning_hpc.baseline/1"
    medians = sorted(run.median_ms("total") for run in side().runs)
    assert content["median_run"]["total_ms"] == pytest.approx(medians[1], rel=1e-3)


def test_the_largest_baseline_is_small(tmp_path: Path) -> None:
    save_baseline(tmp_path / "b.json", side(MAX_BASELINE_RUNS), SKIP)
    assert (tmp_path / "b.json").stat().st_size < 100_000
    with pytest.raises(ValueError, match="9 runs are more than the 8 of a baseline"):
        save_baseline(tmp_path / "b.json", side(MAX_BASELINE_RUNS + 1), SKIP)
    with pytest.raises(ValueError, match="no run of none is long enough"):
        save_baseline(tmp_path / "b.json", Side("none", (), ENVIRONMENT, ("a: 3 steps",)), SKIP)


BAD: dict[str, tuple[Callable[[str], str | bytes], str]] = {
    "empty": (lambda text: "", ":1: the file is empty; make it again"),
    "cut off": (lambda text: text[: len(text) // 2], r":\d+: the file is not JSON, or cut off"),
    "text": (lambda text: "loss,step\n", ":1: the file is not JSON"),
    "binary": (lambda text: b"\x80\xff\x00", ":1: the file is not JSON"),
    "deep": (lambda text: "[" * 200_000, ":1: the file is not JSON"),
    "large": (lambda text: " " * 1_000_001, ":1: 1,000,001 bytes are too many for a baseline"),
    "NaN": (lambda text: text.replace('"skip": 20', '"skip": NaN'), ":1: the file is not JSON"),
    "list": (lambda text: "[1]", r":1: the file is no lightning_hpc\.baseline; give one of compare --save-baseline"),
    "foreign": (lambda text: '{"schema": "other/1"}', r":1: the file is no lightning_hpc\.baseline"),
    "newer": (lambda text: text.replace("baseline/1", "baseline/2"), ":1: schema '.*/2' is not .*/1, but a newer one"),
    "no runs": (lambda text: text.replace('"runs"', '"walks"'), ":1: the baseline is damaged"),
    "bad skip": (lambda text: text.replace('"skip": 20', '"skip": -1'), ":1: the baseline is damaged"),
    "bad size": (lambda text: text.replace('"world_size": 1', '"world_size": "x"'), ":1: the baseline is damaged"),
    "bad time": (lambda text: text.replace('{"total":[[', '{"total":[["x",', 1), r":\d\d: the run is damaged"),
    "huge time": (lambda text: text.replace('"total":[[', '"total":[[1' + "0" * 99 + ",", 1), r":\d\d: the run is dam"),
    "no total": (lambda text: text.replace('"total"', '"tot"'), r":\d\d: the run is damaged \(.*no total"),
    "short block": (lambda text: text.replace("]]", ",1]]", 1), r":\d\d: the run is damaged .*blocks of 10 times"),
    "run is text": (lambda text: text.replace('"steps":400', '"steps":"x"', 1), r":\d\d: the run is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_an_error_that_names_file_and_line(saved: Path, case: str) -> None:
    change, message = BAD[case]
    content = change(saved.read_text())
    saved.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceFileError, match=r"b\.json" + message):
        read_baseline(saved)


def test_the_line_of_a_damaged_run_is_its_own(saved: Path) -> None:
    lines = saved.read_text().split("\n")
    number = next(index for index, line in enumerate(lines) if line.startswith('{"started_at":2'))
    lines[number] = lines[number].replace('"steps":400', '"steps":null')
    saved.write_text("\n".join(lines))
    with pytest.raises(TraceFileError, match=rf":{number + 1}: the run is damaged"):
        read_baseline(saved)
