"""Small models and data for comparing strategies."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, FEATURES, CLASSES = 160, 12, 5


def dataset() -> TensorDataset:
    """A fixed, learnable classification task."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    labels = (inputs @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)
    return TensorDataset(inputs, labels)


def loader(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=batch_size)


class Classifier(LightningModule):
    """An MLP with some 6,000 parameters.

    Args:
        frozen: Whether the first layer takes no gradient.
        unused: Whether a layer takes no part in the loss, a different one on each rank and step.
        batch_norm: Whether batch statistics are used.
        sparse: Whether the first layer is an embedding with sparse gradients.
    """

    def __init__(
        self, frozen: bool = False, unused: bool = False, batch_norm: bool = False, sparse: bool = False
    ) -> None:
        super().__init__()
        self.unused = unused
        self.embedding = nn.Embedding(16, 64, sparse=True) if sparse else None
        self.first = nn.Linear(FEATURES, 64)
        self.norm = nn.BatchNorm1d(64) if batch_norm else nn.LayerNorm(64)
        self.second = nn.Linear(64, 64)
        self.experts = nn.ModuleList(nn.Linear(64, CLASSES) for _ in range(2))
        if frozen:
            self.first.requires_grad_(False)

    def forward(self, inputs: Tensor, expert: int = 0) -> Tensor:
        hidden = self.first(inputs)
        if self.embedding is not None:
            hidden = hidden + self.embedding(inputs.argmax(1)).tanh()
        hidden = self.second(F.gelu(self.norm(hidden)))
        if self.unused:
            return self.experts[expert](hidden)
        return self.experts[0](hidden) + self.experts[1](hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss = F.cross_entropy(self(inputs, (batch_idx + self.global_rank) % 2), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        self.log("val_loss", F.cross_entropy(self(inputs), labels), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0 if self.embedding is not None else 0.9)


class Adversaries(LightningModule):
    """Manual optimisation with two optimizers, two backward passes and toggled parameters in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, FEATURES))
        self.critic = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        optimizers = self.optimizers()
        assert isinstance(optimizers, list)
        noise = real[:, :4].sin()
        for optimizer, real_sign in zip(optimizers, (0.0, -1.0), strict=True):
            self.toggle_optimizer(optimizer)
            fake = self.generator(noise)
            loss = (1 + 2 * real_sign) * -F.softplus(self.critic(fake)).mean()
            loss = loss + real_sign * F.softplus(self.critic(real)).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.02),
            torch.optim.SGD(self.critic.parameters(), lr=0.02),
        ]
