"""Small modules and loaders that take each way through Lightning's training loop."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

Plant = Callable[[str], None]
"""Is called with the name of each place in which a test may want something to happen."""


def plant_nothing(place: str) -> None:
    """The default."""


class Samples(Dataset[Tensor]):
    def __init__(self, count: int, plant: Plant = plant_nothing) -> None:
        self.count = count
        self.plant = plant

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.plant("data_prep")
        return torch.full((4,), index / self.count)


class StreamOfSamples(IterableDataset[Tensor]):
    """Without a length, so that Lightning looks one batch ahead."""

    def __init__(self, count: int) -> None:
        self.samples = Samples(count)

    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.samples[index] for index in range(first, len(self.samples), step))


class Sgd(torch.optim.SGD):
    def __init__(self, parameters: Any, plant: Plant) -> None:
        super().__init__(parameters, lr=0.1)
        self.plant = plant

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.plant("optimizer")
        super().step()
        return loss


class Automatic(pl.LightningModule):
    def __init__(self, plant: Plant = plant_nothing, accumulate: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.plant = plant
        self.accumulate = accumulate

    def configure_optimizers(self) -> Any:
        return Sgd(self.parameters(), self.plant)

    def loss(self, batch: Tensor) -> Tensor:
        self.plant("forward")
        return self.layer(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.plant("validation")
        self.layer(batch)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.plant("backward")
        super().backward(loss, *args, **kwargs)

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        self.plant("before_transfer")
        return batch

    def transfer_batch_to_device(self, batch: Tensor, device: torch.device, dataloader_idx: int) -> Tensor:
        self.plant("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.plant("clipping")
        super().configure_gradient_clipping(*args, **kwargs)

    def on_after_backward(self) -> None:
        self.plant("after_backward_hook")


class Manual(Automatic):
    def __init__(self, plant: Plant = plant_nothing, accumulate: int = 1) -> None:
        super().__init__(plant, accumulate)
        self.automatic_optimization = False

    def train_on(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx % self.accumulate == 0:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if (batch_idx + 1) % self.accumulate == 0 or batch_idx + 1 == self.trainer.num_training_batches:
            optimizer.step()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.train_on(batch, batch_idx)


class AutomaticIter(Automatic):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class ManualIter(Manual):
    def training_step(self, dataloader_iter: Iterator[Any]) -> None:
        batch, batch_idx, _ = next(dataloader_iter)
        self.train_on(batch, batch_idx)


def make_loader(
    count: int, *, workers: int = 0, stream: bool = False, plant: Plant = plant_nothing
) -> DataLoader[Tensor]:
    """A loader of ``count`` batches of one sample."""
    dataset = StreamOfSamples(count) if stream else Samples(count, plant)
    return DataLoader(dataset, batch_size=1, num_workers=workers)


class Sleeper:
    """Sleeps in one place only."""

    def __init__(self, place: str, seconds: float) -> None:
        self.place = place
        self.seconds = seconds

    def __call__(self, place: str) -> None:
        if place == self.place:
            time.sleep(self.seconds)


class HookSleeper(pl.Callback):
    """Plants in the hooks of a callback."""

    def __init__(self, plant: Plant) -> None:
        self.plant = plant

    def on_train_batch_start(self, *args: Any) -> None:
        self.plant("callback")

    def on_before_backward(self, *args: Any) -> None:
        self.plant("before_backward_callback")
