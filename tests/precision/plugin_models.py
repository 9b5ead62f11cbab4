"""Modules that the plugin is tried on, and pressure by a script."""

import random
from collections.abc import Iterable
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hpc.memory import CallableProbe, MemoryReading
from lightning_hpc.precision import MemoryAwarePrecision
from tests.callbacks.test_step_trace import make_trainer

WIDTH = 8
HIGH, CALM, LOW = 95, 80, 10
LIMIT = 4000
"""So little that from high to calm is less than what a block saves."""


class Block(nn.Module):
    """Notes its map: the dtype of what it computes, in forward and where backward comes through."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Module(pl.LightningModule):
    """Blocks, batch normalisation and dropout."""

    def __init__(self, optimizer: str = "adamw", lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.maps: list[tuple[str, list[str]]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.norm(self.first(x)))  # type: ignore[no-any-return]

    def note(self, place: str) -> None:
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, MemoryAwarePrecision) and plugin._map is not None:
            assert set(plugin._map.low) == set(plugin.low_modules)
            self.maps.append((place, plugin.low_modules))

    def loss(self, batch: Any) -> Tensor:
        self.note("forward")
        noise = 0.1 * torch.randn_like(batch[0]) + random.random() + np.random.rand()
        return (self(batch[0] + noise) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        self.note("backward")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        if self.hparams["optimizer"] == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


class Manual(Module):
    """Two optimizers that step at different times, so that gradients are left over."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        for every, optimizer in enumerate(optimizers, 1):
            if batch_idx % every == every - 1:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        halves = [*self.first.parameters(), *self.norm.parameters()], list(self.blocks.parameters())
        return [torch.optim.AdamW(half, lr=0.01) for half in halves]


def loader(batches: int = 100, size: int = 4) -> DataLoader[Any]:
    """The same batch again and again, since `DataLoader` begins anew when a run is resumed."""
    x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(0)).repeat(batches, 1)
    return DataLoader(TensorDataset(x), batch_size=size)


class Script:
    """A probe whose readings, percent of the limit, are given; the last one stays."""

    def __init__(self, percents: Iterable[int]) -> None:
        self.percents = list(percents)
        self.reads = 0

    def __call__(self) -> MemoryReading:
        percent = self.percents[min(self.reads, len(self.percents) - 1)]
        self.reads += 1
        return MemoryReading(percent * LIMIT // 100, LIMIT)


def make_plugin(
    percents: Iterable[int], dtype: Literal["bf16", "fp16"] = "bf16", **kwargs: Any
) -> MemoryAwarePrecision:
    kwargs = {"check_every_n_steps": 1, "probe": CallableProbe(Script(percents)), **kwargs}
    return MemoryAwarePrecision(dtype, **kwargs)


def fit(
    module: pl.LightningModule, *callbacks: pl.Callback, plugin: Any = None, ckpt: Any = None, **kwargs: Any
) -> Any:
    """Trains and returns the Trainer."""
    pl.seed_everything(0, verbose=False)
    plugins = {} if plugin is None else {"plugins": [plugin]}
    trainer = make_trainer(
        *callbacks, **{"max_steps": 12, "max_epochs": -1, "limit_val_batches": 0, **plugins, **kwargs}
    )
    trainer.fit(module, loader(), loader(2), ckpt_path=ckpt)
    return trainer


def everything(trainer: pl.Trainer) -> Any:
    """All that training has changed."""
    return {
        "module": {name: value.clone() for name, value in trainer.lightning_module.state_dict().items()},
        "optimizers": [optimizer.state_dict()["state"] for optimizer in trainer.optimizers],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "steps": trainer.global_step,
    }
