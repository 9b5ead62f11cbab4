"""`OutOfMemoryRecovery` where several processes train: nobody waits for the one that failed."""

import time
import warnings

import lightning.pytorch as pl
import pytest

from lightning_hpc.callbacks import OutOfMemoryRecovery
from lightning_hpc.memory.out_of_memory import TrainingOutOfMemoryError
from lightning_hpc.strategies import HPCStrategy
from tests.callbacks.failing_models import Arm, Failing, Faults, Place
from tests.callbacks.test_out_of_memory_recovery import calm_plugin
from tests.callbacks.test_step_trace import make_trainer
from tests.helpers import run_ranks


def fit_on_ranks(rank: int, world_size: int, strategy: str, place: Place, failing: int) -> tuple[str, float]:
    warnings.simplefilter("ignore")
    pl.seed_everything(0, verbose=False)
    faults = Faults()
    callbacks: list[pl.Callback] = [OutOfMemoryRecovery()]
    if rank == failing:
        callbacks.append(Arm(faults, 2, place))
    chosen = HPCStrategy(topology=[[0, 1], [2]]) if strategy == "nodes" else strategy
    trainer = make_trainer(*callbacks, devices=world_size, strategy=chosen, plugins=[calm_plugin()], max_steps=6)
    try:
        trainer.fit(Failing(faults))
    except TrainingOutOfMemoryError as error:
        return str(error), time.monotonic()
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("place", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 2), ("nodes", 3)])
@pytest.mark.parametrize("failing", [0, 1])
def test_every_rank_ends_with_the_name_of_the_one_that_failed(
    strategy: str, world_size: int, place: Place, failing: int
) -> None:
    results = run_ranks(fit_on_ranks, world_size, strategy, place, failing, init_gloo=False, timeout=60)
    for rank, (text, _) in enumerate(results):
        assert f"rank {failing}" in text
        assert "step 2" in text
        assert text.startswith("this rank ends, because") == (rank != failing)
    ends = [end for _, end in results]
    assert max(ends) - min(ends) < 10  # seconds; the time-out of a collective is half an hour
