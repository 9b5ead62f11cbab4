"""`StragglerMonitor` in real fits of several processes."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_hpc.callbacks import StepTrace, straggler_monitor
from lightning_hpc.callbacks.straggler_monitor import StragglerMonitor
from lightning_hpc.strategies import HPCStrategy
from lightning_hpc.trace import read_traces
from tests.callbacks.models import Automatic, Sleeper, make_loader
from tests.callbacks.test_step_trace import make_trainer
from tests.helpers import RanksFailedError, run_ranks

# Long enough beside what other work on the machine does to a step.
USUAL_S, SLOW_S = 0.003, 0.012


class Together(Sleeper):
    """Sleeps in each forward, and longer on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__("forward", SLOW_S if rank == 1 else USUAL_S)


def fit(rank: int, world_size: int, dirpath: Path, strategy: Any) -> tuple[Any, ...]:
    warnings.simplefilter("ignore")
    straggler_monitor._LAST_WAIT_S = 60.0
    monitor = StragglerMonitor(interval=40)
    # Whoever comes first in the list, the trace is there.
    trainer = make_trainer(
        monitor, StepTrace(dirpath, console=False), devices=world_size, strategy=strategy, max_epochs=2
    )
    trainer.fit(Automatic(Together(rank)), make_loader(40 * world_size))
    return [(each.rank, each.cause) for each in monitor.stragglers], monitor.lost_seconds


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "ddp"), (4, HPCStrategy(topology=[[0, 1], [2, 3]]))])
def test_a_slow_rank_is_named_while_it_trains(tmp_path: Path, ranks: int, strategy: Any) -> None:
    results = run_ranks(fit, ranks, tmp_path, strategy, init_gloo=False)
    # Other work on the machine may slow another rank down, too.
    assert [found[0] for found, _ in results] == [(1, "compute")] * ranks
    assert results[0][1] > 0.5 * 77 * (SLOW_S - USUAL_S)
    traces = read_traces(tmp_path)
    events = [(event["name"], event["details"]["rank"]) for event in traces[0].events]
    assert ("straggler", 1) in events
    assert not any(trace.events for trace in traces[1:])


class Failing(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 50 and trainer.global_rank == 1:
            raise KeyError("planted")


def fit_that_fails(rank: int, world_size: int, dirpath: Path) -> None:
    warnings.simplefilter("ignore")
    trainer = make_trainer(
        StepTrace(dirpath, console=False), StragglerMonitor(33), Failing(), devices=world_size, strategy="ddp"
    )
    trainer.fit(Automatic(), make_loader(100 * world_size))


def test_the_error_of_a_rank_is_what_is_seen(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="planted") as failure:
        run_ranks(fit_that_fails, 2, tmp_path, init_gloo=False)
    assert "did not finish" not in str(failure.value)


def test_one_process_trains_as_without(tmp_path: Path) -> None:
    monitor = StragglerMonitor(33)
    trainer = make_trainer(StepTrace(tmp_path, console=False), monitor)
    trainer.fit(Automatic(), make_loader(40))
    assert trainer.global_step == 40
    assert monitor.stragglers == ()
