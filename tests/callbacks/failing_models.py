"""Models that run out of memory at a chosen place."""

import random
from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Place = Literal["forward", "backward", "optimizer", "state"]
WIDTH = 8


class Faults:
    """Says when something fails: the next time that a place is passed once it was armed."""

    def __init__(self) -> None:
        self.armed: Place | None = None
        self.times = 1

    def pass_by(self, place: Place) -> None:
        if place == self.armed and self.times > 0:
            self.times -= 1
            raise torch.OutOfMemoryError(f"tried to allocate too much in {place}")


class Fail(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: Callable[[], None]) -> Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.fail()
        return gradients[0], None


class Block(nn.Module):
    """Has running statistics, and random numbers."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH), nn.GELU())
        self.out = nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x + nn.functional.dropout(self.out(self.layers(x)), 0.1)
        # Backward has given gradients to the layers behind before it comes here.
        return Fail.apply(x, lambda: self.faults.pass_by("backward"))  # type: ignore[no-any-return]


class FailingAdam(torch.optim.AdamW):
    """Fails before it steps, or with the state of some parameters made and of one half made."""

    faults: Faults

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.faults.pass_by("optimizer")
        if self.faults.armed == "state" and self.faults.times:
            first, second = self.param_groups[0]["params"][:2]
            self.state[first] |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(first)}
            self.state[second]["step"] = torch.zeros(())
            self.faults.pass_by("state")
        super().step()
        return loss


class Failing(pl.LightningModule):
    """Draws from all generators, has a metric, and logs.

    Args:
        faults: When it fails.
        momentum: Samples of its batches.
    """

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.blocks = nn.Sequential(*(Block(faults) for _ in range(4)))
        self.error = torchmetrics.MeanSquaredError()
        self.seen: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        x = batch + 0.01 * torch.randn_like(batch) + 0.01 * random.random() + 0.01 * np.random.rand()
        x = self.blocks[:2](x)
        self.seen.append(0.0)
        self.error(x, batch)
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.faults.pass_by("forward")
        loss = (self.blocks[2:](x) - batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = FailingAdam(self.parameters(), lr=0.01)
        optimizer.faults = self.faults
        return optimizer

    def train_dataloader(self) -> Any:
        x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x), batch_size=4)


class FailingManual(Failing):
    """Two optimizers, of which the second steps every other time; gradients of both accumulate over two backwards."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss(batch[0]))
            self.untoggle_optimizer(optimizer)
        for optimizer in optimizers[: 1 + batch_idx % 2]:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        optimizers = [FailingAdam(self.blocks[half::2].parameters(), lr=0.01) for half in range(2)]
        for optimizer in optimizers:
            optimizer.faults = self.faults
        return optimizers


class Arm(pl.Callback):
    """Arms the faults before a batch.

    Args:
        faults: Those of the model.
        batch: Its index.
        place: Where to fail.
        times: How often.
    """

    def __init__(self, faults: Faults, batch: int, place: Place, times: int = 1) -> None:
        self.faults = faults
        self.batch = batch
        self.place: Place = place
        self.times = times

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            self.faults.armed, self.faults.times = self.place, self.times
