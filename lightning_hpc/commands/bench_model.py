"""The model that ``lightning-hpc bench comm`` trains unless it is given another one."""

import math

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

_SAMPLES = 64  # that differ; they come again and again


class SyntheticModel(LightningModule):
    """Blocks whose matrices have the shapes of a transformer's, on random numbers.

    Args:
        parameters: How many it has, about.
        batch_size: Samples a step and rank.
        tokens: Rows of numbers in a sample, on which the time of a step depends and its traffic does not.
    """

    def __init__(self, parameters: int = 3_300_000, batch_size: int = 2, tokens: int = 64) -> None:
        super().__init__()
        depth = 4 if parameters < 10_000_000 else 12
        # A block has 12 width² of them.
        self.width = max(8 * round(math.sqrt(parameters / (12 * depth)) / 8), 8)
        self.batch_size, self.tokens = batch_size, tokens
        self.blocks = nn.Sequential(*(_Block(self.width) for _ in range(depth)))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.blocks(batch), batch.flip(-1))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(_Samples(self.tokens, self.width), batch_size=self.batch_size)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_mixing, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_mixing(x)).chunk(3, dim=-1)
        x = x + self.out(torch.sigmoid(q + k) * v)
        return x + torch.as_tensor(self.mlp(self.norm_mlp(x)))


class _Samples(Dataset[Tensor]):
    """So many that no epoch ends; made once, so that no step waits for them."""

    def __init__(self, tokens: int, width: int) -> None:
        self._samples = torch.randn(_SAMPLES, tokens, width, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 2**24

    @override
    def __getitem__(self, index: int) -> Tensor:
        return self._samples[index % _SAMPLES]
