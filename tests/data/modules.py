"""A model that remembers its batches, a callback that saves checkpoints, and datasets, for the DataModule's tests."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_hpc.data.datamodule import SharedMemoryDataModule

SAMPLES = 53


class Drawn(Dataset[tuple[int, Tensor]]):
    """Sample i is i, and something random."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.rand(())


class Stream(IterableDataset[tuple[int, Tensor]]):
    """The numbers below a length that it does not tell, shared out among workers."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(worker, self.length, workers):
            yield number, torch.zeros(())


def content(batch: Any) -> Any:
    """What is in a batch of any of these datasets, or in a collection of batches."""
    if isinstance(batch, dict):
        return {name: content(each) for name, each in batch.items()}
    if batch is None or isinstance(batch[0], (list, tuple)):
        return batch and [content(each) for each in batch]
    return batch[0].tolist(), batch[1].flatten().tolist()


class Remembers(pl.LightningModule):
    """Keeps epoch and content of all batches.

    Args:
        crash_at: The training batch that raises.
    """

    def __init__(self, crash_at: int | None = None) -> None:
        super().__init__()
        self.layer, self.crash_at = nn.Linear(1, 1), crash_at
        self.seen: list[tuple[int, int, Any]] = []
        self.evaluated: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(self.seen) == self.crash_at:
            raise ArithmeticError("crash")
        self.seen.append((self.current_epoch, batch_idx, content(batch)))
        loss: Tensor = self.layer(torch.ones(1, 1)).mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated.append((dataloader_idx, batch[0].tolist()))
        self.log("mean", batch[0].float().mean(), sync_dist=True, batch_size=len(batch[0]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> list[int]:
        numbers: list[int] = batch[0].tolist()
        return numbers

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Saves(pl.Callback):
    """Saves a checkpoint in each of some hooks, and how many batches had been trained on."""

    def __init__(self, folder: Path, hooks: Sequence[str]) -> None:
        self.folder = folder
        self.saved: list[tuple[str, int, Path]] = []
        for name in hooks:
            setattr(self, name, self._hook(name))

    def _hook(self, name: str) -> Callable[..., None]:
        def save(trainer: pl.Trainer, module: Remembers, *_: Any) -> None:
            path = self.folder / f"{len(self.saved)}.ckpt"
            trainer.save_checkpoint(path)
            self.saved.append((name, len(module.seen), path))

        return save


class Plain(pl.LightningDataModule):
    """Gives what functions make."""

    def __init__(self, train: Callable[[], Any]) -> None:
        super().__init__()
        self.train = train

    def train_dataloader(self) -> Any:
        return self.train()


def wrapped(train: Callable[[], Any], num_workers: int = 0) -> SharedMemoryDataModule:
    return SharedMemoryDataModule(datamodule=Plain(train), num_workers=num_workers)


def plain_loader(dataset: Any = None, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Drawn() if dataset is None else dataset, batch_size=kwargs.pop("batch_size", 4), **kwargs)


def make_trainer(**kwargs: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        **kwargs,
    }
    return pl.Trainer(**settings)


def fit(
    data: pl.LightningDataModule, resume: Path | None = None, model: Remembers | None = None, **kwargs: Any
) -> tuple[Remembers, pl.Trainer]:
    """Trains; a run that goes on draws other numbers before, which must not matter."""
    pl.seed_everything(1, verbose=False)
    if resume is not None:
        torch.manual_seed(99)
    model = Remembers() if model is None else model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of few workers and missing steps
        trainer = make_trainer(**kwargs)
        trainer.fit(model, datamodule=data, ckpt_path=resume, weights_only=False)
    return model, trainer
