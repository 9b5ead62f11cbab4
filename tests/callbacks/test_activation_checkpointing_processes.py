"""`ActivationCheckpointing` where several processes train."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hpc.callbacks import ActivationCheckpointing
from lightning_hpc.memory import CheckpointPlan, SavedActivations
from tests.callbacks.test_activation_checkpointing import Stacked
from tests.callbacks.test_step_trace import make_trainer
from tests.helpers import run_ranks
from tests.memory.block_models import WIDTH, equal

Result = tuple[list[torch.Tensor], dict[str, torch.Tensor], CheckpointPlan | None]


class LongSamples(Stacked):
    """The second rank's samples are four times as long."""

    def train_dataloader(self) -> Any:
        pl.seed_everything(self.global_rank, verbose=False)  # dropout differs by rank too
        x = torch.randn(24, 5 if self.global_rank == 0 else 20, WIDTH)
        return DataLoader(TensorDataset(x), batch_size=4)


def fit_on_ranks(rank: int, world_size: int, strategy: str, budget: int | None) -> Result:
    warnings.simplefilter("ignore")
    pl.seed_everything(0, verbose=False)
    checkpointing = ActivationCheckpointing(budget or 1)
    callbacks = [] if budget is None else [checkpointing]
    model = LongSamples()
    trainer = make_trainer(*callbacks, devices=world_size, strategy=strategy, use_distributed_sampler=False)
    trainer.fit(model)
    return model.losses, model.state_dict(), checkpointing.plan


def plain_bytes(length: int) -> int:
    """What a step of samples of this length saves."""
    model = Stacked()
    x = torch.randn(4, length, WIDTH)
    with SavedActivations([*model.parameters(), x]) as saved:
        (model(x) - 1).square().mean()
    return saved.peak_bytes


@pytest.mark.parametrize("strategy", ["ddp", "hpc"])
def test_the_rank_that_needs_most_chooses_for_all_and_results_stay_bitwise(strategy: str) -> None:
    budget = 2 * plain_bytes(5)  # enough for the first rank
    plain = run_ranks(fit_on_ranks, 2, strategy, None, init_gloo=False)
    others = run_ranks(fit_on_ranks, 2, strategy, budget, init_gloo=False)
    for (losses, state, _), (other_losses, other_state, _) in zip(plain, others, strict=True):
        assert equal((losses, state), (other_losses, other_state))
    (_, _, first), (_, _, second) = others
    assert first == second
    assert first is not None
    assert first.fits
    assert first.plain_peak_bytes == plain_bytes(20) > budget
