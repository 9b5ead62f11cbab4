"""`StepTrace` where several processes train, and where one is killed."""

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from lightning_hpc.callbacks import StepTrace
from lightning_hpc.strategies import HPCStrategy
from lightning_hpc.trace import read_traces
from tests.callbacks.models import Automatic, make_loader
from tests.callbacks.test_step_trace import assert_closed, make_trainer
from tests.helpers import run_ranks


def test_kills_at_random_moments_cost_the_last_line_at_most() -> None:
    command = [sys.executable, "-m", "tests.callbacks.soak_step_trace", "--only", "kills", "--kills", "8"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "kills: 8, each file read to its end" in done.stdout


def fit_on_ranks(rank: int, world_size: int, dirpath: Path, topology: Any) -> int:
    warnings.simplefilter("ignore")
    if rank == 1:
        time.sleep(0.5)  # a rank that looks late must not see the directory of one that was early
    strategy = "ddp" if topology is None else HPCStrategy(topology=topology)
    trainer = make_trainer(StepTrace(dirpath, console=False), devices=world_size, strategy=strategy)
    trainer.fit(Automatic(), make_loader(4))
    return os.getpid()


def test_ranks_agree_on_the_attempt_and_ddp_does_not_know_its_communication(tmp_path: Path) -> None:
    (tmp_path / "attempt_004").mkdir()
    pids = run_ranks(fit_on_ranks, 2, tmp_path, None, init_gloo=False)
    traces = read_traces(tmp_path)
    assert [str(trace.path.relative_to(tmp_path)) for trace in traces] == [
        "attempt_005/rank_00000.jsonl",
        "attempt_005/rank_00001.jsonl",
    ]
    assert [trace.header["pid"] for trace in traces] == pids
    for rank, trace in enumerate(traces):
        assert (trace.header["rank"], trace.header["world_size"], trace.header["attempt"]) == (rank, 2, 5)
        assert (trace.header["clock_offset_ms"], trace.header["clock_uncertainty_ms"]) == (0, 0)  # one machine
        assert len(trace.steps) == 2
        assert {(record["rank"], record["comm_ms"], record["comm_bytes"]) for record in trace.steps} == {
            (rank, None, None)
        }
        assert_closed(trace)


def test_a_strategy_with_comm_stats_shows_its_communication(tmp_path: Path) -> None:
    run_ranks(fit_on_ranks, 2, tmp_path, [[0], [1]], init_gloo=False)
    for trace in read_traces(tmp_path):
        assert all(record["comm_ms"] > 0 and record["comm_bytes"] > 0 for record in trace.steps)
        assert all(isinstance(record["comm_bytes"], int) for record in trace.steps)
        assert_closed(trace)


def fit_tuned(rank: int, world_size: int, dirpath: Path) -> None:
    warnings.simplefilter("ignore")
    strategy = HPCStrategy(topology=[[0], [1]], compression="auto")
    trainer = make_trainer(StepTrace(dirpath, console=False), devices=world_size, strategy=strategy)
    trainer.fit(Automatic(), make_loader(160))


def test_the_rank_that_decides_writes_what_auto_has_chosen(tmp_path: Path) -> None:
    run_ranks(fit_tuned, 2, tmp_path, init_gloo=False)
    deciding, other = read_traces(tmp_path)
    assert not other.decisions
    decision = deciding.decisions[0]
    assert decision["choice"] in decision["measured_ms"]
    assert decision["choice"] in decision["reason"]
    assert {"ddp", "none", "int4"} <= decision["predicted_ms"].keys()
    before = deciding.records[deciding.records.index(decision) - 1]
    assert before["step"] == decision["step"]
