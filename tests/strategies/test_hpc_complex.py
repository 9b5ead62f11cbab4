"""Complex parameters, which DistributedDataParallel hands to a hook as real numbers, are averaged exactly."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_hpc.strategies import HPCStrategy
from tests.helpers import run_ranks
from tests.strategies.test_hpc import make_trainer


class Complex(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.complex = nn.Parameter(torch.zeros(300, dtype=torch.complex64))
        self.real = nn.Parameter(torch.zeros(300))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.global_rank + 1) * (self.complex.real.sum() + 2 * self.complex.imag.sum() + self.real.sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _train(rank: int, world_size: int, codec: str) -> tuple[Tensor, dict[str, int]]:
    strategy = HPCStrategy(topology=[[0], [1]], compression=codec)
    model = Complex()
    make_trainer(strategy, world_size, max_steps=1).fit(model, torch.utils.data.DataLoader(torch.zeros(4, 1)))
    assert strategy.comm_stats is not None
    return model.complex.detach(), dict(strategy.comm_stats.fallbacks)


def test_complex_parameters_take_the_exact_path() -> None:
    for weights, fallbacks in run_ranks(_train, 2, "int4", init_gloo=False):
        torch.testing.assert_close(weights, torch.full((300,), -1.5 - 3j, dtype=torch.complex64))
        assert fallbacks["dtype"] >= 1
