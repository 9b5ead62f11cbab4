"""The case about what lies between two epochs."""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.micro.loader_cases.datasets import Sleeping
from benchmarks.micro.loader_cases.figures import OWN, PEER, Figure, Size, Target, compare, count_workers, take_turns
from lightning_hpc.commands.timed_fit import ONLY_TRAINING
from lightning_hpc.data import SharedMemoryDataModule, SharedMemoryLoader

SAMPLE_S = 0.005
STEP_S = 0.025
BATCH = 8
WORKERS = 2


class Sleeper(pl.LightningModule):
    """A step of known length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(STEP_S)
        loss: Tensor = self.layer(torch.ones(1, 1)).mean()
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Clock(Callback):
    """Keeps when each step of each epoch began and ended, in seconds."""

    def __init__(self) -> None:
        self.epochs: list[list[tuple[float, float]]] = []
        self._began = 0.0

    @override
    def on_train_epoch_start(self, *_: Any) -> None:
        self.epochs.append([])

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.epochs[-1].append((self._began, time.perf_counter()))

    def worst_gap(self) -> float:
        """From the end of an epoch's last step to the begin of the next one's first, in median steps."""
        step = statistics.median(end - begin for epoch in self.epochs for begin, end in epoch)
        gaps = [after[0][0] - before[-1][1] for before, after in zip(self.epochs, self.epochs[1:], strict=False)]
        return max(gaps) / step


def epoch_gap(size: Size) -> Iterator[Figure]:
    """The longest gap between two epochs of a Trainer, in steps: at most one (Lightning#10389).

    Two workers that need 20 ms a batch together, a step of 25 ms, shuffled, five epochs. `SharedMemoryDataModule` is
    told each epoch by Lightning's `set_epoch`; `SharedMemoryLoader` draws its order from PyTorch's generator.
    """
    target = Target("at most one step", lambda median, _: median <= 1)
    length = BATCH * size.of(20, least=4)
    dataset = Sleeping(length, 1000, dict.fromkeys(range(length), SAMPLE_S))
    kwargs: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": WORKERS}
    data: dict[str, Callable[[], Any]] = {
        PEER: lambda: DataLoader(dataset, **kwargs),
        f"{PEER}, persistent": lambda: DataLoader(dataset, **kwargs, persistent_workers=True),
        OWN: lambda: SharedMemoryLoader(dataset, **kwargs),
        "SharedMemoryDataModule": lambda: SharedMemoryDataModule(dataset, **kwargs),
    }
    found = take_turns(list(data), size, "epoch-gap", lambda name: fit(data[name]()).worst_gap())
    yield from compare("epoch-gap", count_workers(WORKERS), "longest gap, in steps", found, target)


def fit(data: Any) -> Clock:
    """Trains for five epochs."""
    clock = Clock()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers
        trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=5, callbacks=[clock], **ONLY_TRAINING)
        trainer.fit(Sleeper(), data)
    return clock
