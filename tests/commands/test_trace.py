import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_hpc.callbacks import MemoryMonitor, StepTrace
from lightning_hpc.commands.trace import main
from tests.callbacks.models import Automatic, make_loader
from tests.callbacks.test_step_trace import make_trainer
from tests.report.runs import Noise, make_times, write_trace
from tests.trace.chrome_rules import parse


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks, two attempts; the files say when they were started."""
    for attempt in range(2):
        for rank in range(2):
            path = tmp_path / "run" / f"attempt_{attempt:03d}" / f"rank_{rank:05d}.jsonl"
            write_trace(path, make_times(np.random.default_rng(rank), 5 + attempt, Noise()), world_size=2)
            edit_header(path, rank=rank, attempt=attempt, started_at=1e9 + attempt + rank / 2)
    return tmp_path / "run"


def edit_header(path: Path, **values: object) -> None:
    first, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(first), **values}) + "\n" + rest)


def refusal(arguments: list[str | Path], capsys: pytest.CaptureFixture[str]) -> str:
    """What it says, after it has ended with status 2."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_all_ranks_of_the_last_attempt_are_in_one_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "trace.json"
    main(["merge", str(run), "--output", str(output)])
    shown = capsys.readouterr()
    assert shown.out.startswith(f"wrote {output}: attempt 1, ranks: 2, ")
    assert shown.err == ""
    events = parse(output.read_text())
    iterations = [event for event in events if event["name"] == "iteration"]
    assert [event["pid"] for event in iterations] == [0] * 26 + [1] * 26
    assert iterations[26]["ts"] - iterations[0]["ts"] == pytest.approx(500_000)
    assert not list(tmp_path.glob("*.part"))


def test_another_attempt_and_a_compressed_file(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "trace.json.gz"
    main(["merge", str(run), "--output", str(output), "--attempt", "0"])
    events = parse(gzip.decompress(output.read_bytes()).decode())
    assert sum(event["name"] == "iteration" for event in events) == 2 * 25


def test_what_the_picture_cannot_show_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "attempt_001" / "rank_00001.jsonl").unlink()
    edit_header(run / "attempt_000" / "rank_00001.jsonl", host="elsewhere", clock_offset_ms=None)
    main(["merge", str(run), "--output", str(tmp_path / "t.json")])
    assert capsys.readouterr().err == "warning: only 1 of 2 ranks left a trace\n"
    main(["merge", str(run), "--output", str(tmp_path / "t.json"), "--attempt", "0"])
    assert "warning: the hosts' clocks were not compared" in capsys.readouterr().err


def test_bad_input_is_refused_in_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "t.json"
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign.jsonl").write_text("{}\n")
    for arguments, message in (
        ([tmp_path / "nowhere", "--output", output], "nowhere does not exist; give the directory"),
        ([tmp_path / "empty", "--output", output], "no *.jsonl file in"),
        ([tmp_path / "foreign.jsonl", "--output", output], "foreign.jsonl:1: the first line is no header"),
        ([run, "--output", output, "--attempt", "7"], "there is no attempt 7; those that there are: 0, 1"),
        ([run, "--output", tmp_path / "t.txt"], "t.txt: its name must end with one of .json, .json.gz"),
        ([run, "--output", tmp_path / "no" / "t.json"], "must be a folder"),
    ):
        error = refusal(["merge", *arguments], capsys)
        assert message in error
        assert error.startswith("lightning-hpc trace merge: ")
        assert error.count("\n") == 1
    for arguments in (["merge", run], ["merge", run, "--output", output, "--attempt", "-1"], []):
        assert refusal(arguments, capsys)
    assert not output.exists()


def test_an_error_on_the_way_leaves_the_file_of_before(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "t.json"
    output.write_text("before")
    path = run / "attempt_001" / "rank_00001.jsonl"
    path.write_text(path.read_text().replace('"start_ms":', '"start_ms":1e999,"was":', 1))
    assert "start_ms is inf, which is no time" in refusal(["merge", run, "--output", output], capsys)
    assert output.read_text() == "before"
    assert not list(tmp_path.glob("*.part"))


def test_a_fit_with_all_that_may_lie_in_an_iteration(tmp_path: Path) -> None:
    callbacks = [
        StepTrace(tmp_path, console=False),
        MemoryMonitor(2),
        ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=3, save_top_k=-1),
    ]
    options = {"logger": CSVLogger(tmp_path / "logs"), "log_every_n_steps": 2, "val_check_interval": 2, "max_epochs": 2}
    trainer = make_trainer(*callbacks, enable_checkpointing=True, **options)
    trainer.fit(Automatic(), make_loader(6), make_loader(2))
    output = tmp_path / "trace.json"
    main(["merge", str(tmp_path), "--output", str(output)])
    events = parse(output.read_text())
    slices = [event for event in events if event["ph"] == "X"]
    assert {"validation", "checkpoint", "logging", "startup", "between_epochs"} <= {each["name"] for each in slices}
    iterations = [(each["ts"], each["ts"] + each["dur"]) for each in slices if each["name"] == "iteration"]
    assert len(iterations) == 12
    for each in slices:
        # A validation lies within its iteration, with all that it holds.
        if each["name"] == "validation":
            end = each["ts"] + each["dur"]
            assert sum(start <= each["ts"] and end <= stop + 1e-3 for start, stop in iterations) == 1
    assert any(event["ph"] == "C" for event in events)
