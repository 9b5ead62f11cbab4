import json
import os
from pathlib import Path

import numpy as np
import pytest

from lightning_hpc.report.run_sample import MIN_STEPS
from lightning_hpc.report.side import MAX_RUNS, read_side
from lightning_hpc.trace import TraceFileError
from tests.report.runs import SKIP, Noise, Times, make_times, write_trace


def times(seed: int = 0, steps: int = 150, factor: float = 1.0) -> Times:
    made = make_times(np.random.default_rng(seed), steps, Noise())
    return {figure: factor * values for figure, values in made.items()}


def test_each_attempt_below_the_directory_is_a_run(tmp_path: Path) -> None:
    for number, name in enumerate(("a/attempt_000", "a/attempt_001", "b/step_trace/attempt_000")):
        write_trace(tmp_path / name / "rank_00000.jsonl", times(number), started_at=10 - number)
    side = read_side([tmp_path], SKIP)
    assert [run.started_at for run in side.runs] == [8, 9, 10]
    assert {run.steps for run in side.runs} == {150}
    assert side.notes == ()
    assert side.environment == {"world_size": 1, "hosts": ["a"], "clocks": ["host"], "versions": ["torch 2"]}
    assert len(read_side([tmp_path / "a", tmp_path / "b"], SKIP).runs) == 3
    assert len(read_side([tmp_path / "a/attempt_000/rank_00000.jsonl"], SKIP).runs) == 1


def test_the_first_steps_do_not_count(tmp_path: Path) -> None:
    file = write_trace(tmp_path / "rank_00000.jsonl", times())
    cold, warm = (read_side([file], skip).runs[0] for skip in (0, SKIP))
    assert cold.times_ms["total"].max() > 2 * np.median(cold.times_ms["total"])
    assert warm.steps == cold.steps - SKIP
    assert warm.times_ms["total"][0].max() < cold.times_ms["total"][0].max()


def test_of_several_ranks_the_slowest_counts_for_each_figure(tmp_path: Path) -> None:
    for rank, factor in enumerate((1.0, 1.3, 1.1)):
        write_trace(tmp_path / f"rank_{rank:05d}.jsonl", times(factor=factor), rank=rank, world_size=3)
    (run,) = read_side([tmp_path], SKIP).runs
    assert run.median_ms("forward") == pytest.approx(1.3 * np.median(times()["forward"][SKIP:]), rel=0.01)


def test_a_missing_rank_is_noted(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank_00000.jsonl", times(), world_size=2)
    (note,) = read_side([tmp_path], SKIP).notes
    assert "files of 1 of 2 ranks" in note


def test_a_phase_that_was_not_measured_is_absent_and_not_zero(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank_00000.jsonl", times(), comm=False)
    assert "comm" not in read_side([tmp_path], SKIP).runs[0].times_ms


def test_a_short_run_is_left_out_with_a_note(tmp_path: Path) -> None:
    write_trace(tmp_path / "a" / "rank_00000.jsonl", times(steps=MIN_STEPS - 1))
    write_trace(tmp_path / "b" / "rank_00000.jsonl", times(steps=MIN_STEPS))
    side = read_side([tmp_path], SKIP)
    assert len(side.runs) == 1
    assert f"{MIN_STEPS - 1} steps after the first {SKIP}, of {MIN_STEPS} needed" in side.notes[0]


def test_runs_of_different_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    write_trace(tmp_path / "a" / "rank_00000.jsonl", times(), world_size=1)
    write_trace(tmp_path / "b" / "rank_00000.jsonl", times(), world_size=2)
    with pytest.raises(ValueError, match=r"are of \[1, 2\] ranks"):
        read_side([tmp_path], SKIP)


@pytest.mark.parametrize("value", ['"fast"', "-1.0", "true", "1e999", "null", "[1]"])
def test_what_is_no_duration_is_an_error_that_names_file_and_line(tmp_path: Path, value: str) -> None:
    file = write_trace(tmp_path / "rank_00000.jsonl", times())
    lines = file.read_text().split("\n")
    record = json.loads(lines[41])
    lines[41] = lines[41].replace(f'"total_ms":{record["total_ms"]:.6f}', f'"total_ms":{value}')
    file.write_text("\n".join(lines))
    with pytest.raises(TraceFileError, match=r"rank_00000\.jsonl:42: total_ms is .*, which is no time"):
        read_side([file], SKIP)


@pytest.mark.parametrize("key", ["started_at", "world_size"])
def test_a_header_with_another_kind_of_value_is_an_error(tmp_path: Path, key: str) -> None:
    file = write_trace(tmp_path / "rank_00000.jsonl", times())
    header, rest = file.read_text().split("\n", 1)
    file.write_text(json.dumps({**json.loads(header), key: "x"}) + "\n" + rest)
    with pytest.raises(TraceFileError, match=rf":1: {key} is 'x'"):
        read_side([file], SKIP)


def test_sizes_are_bounded(tmp_path: Path) -> None:
    deep = tmp_path / "deep" / "rank_00000.jsonl"
    deep.parent.mkdir()
    deep.write_text("[" * 200_000 + "\n")
    with pytest.raises(TraceFileError, match=r"nested too deeply|is not JSON"):
        read_side([deep], SKIP)
    large = tmp_path / "large.jsonl"
    with large.open("wb") as file:
        os.truncate(file.fileno(), 2**31)
    with pytest.raises(TraceFileError, match="the file has 2,147,483,648 bytes; at most"):
        read_side([large], SKIP)
    for number in range(MAX_RUNS + 1):
        write_trace(tmp_path / "many" / str(number) / "rank_00000.jsonl", times(steps=1))
    with pytest.raises(ValueError, match="more than 100 runs"):
        read_side([tmp_path / "many"], SKIP)


def test_a_directory_without_traces_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \*\.jsonl file in .*; give the directory that StepTrace"):
        read_side([tmp_path], SKIP)
