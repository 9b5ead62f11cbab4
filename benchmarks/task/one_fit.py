"""Worker of the task benchmark: one fit, plain or with this package, in this process. Prints one JSON line."""

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.task.photos import PhotoData, PhotoReader
from examples.digits import DigitReader, Digits
from examples.language_model import LanguageModel, StandardLibrary
from examples.segmentation import Scenes, UNet
from lightning_hpc.callbacks import (
    ActivationCheckpointing,
    MemoryMonitor,
    OutOfMemoryRecovery,
    PerformanceReport,
    StepTrace,
    StragglerMonitor,
)
from lightning_hpc.data import SharedMemoryDataModule
from lightning_hpc.memory import CallableProbe, HostProbe, MemoryReading
from lightning_hpc.precision import MemoryAwarePrecision

WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        model: Makes the module.
        data: Makes the DataModule, for plain Lightning and for this package alike.
        metric: Its name in the logs.
        batch_size: Samples of a step.
        steps: Of a fit.
        is_short_of_memory: Whether the package's precision and checkpointing act as under pressure.
    """

    model: Callable[[], pl.LightningModule]
    data: Callable[[], pl.LightningDataModule]
    metric: str
    batch_size: int
    steps: int
    is_short_of_memory: bool = False


TASKS = {
    "language_model": Task(
        lambda: LanguageModel(width=256, depth=4), lambda: StandardLibrary(128, 4), "val_perplexity", 4, 150
    ),
    "digits": Task(DigitReader, lambda: Digits(16), "val_accuracy", 16, 780),
    "photos": Task(PhotoReader, lambda: PhotoData(64, 6400, 1), "metric", 64, 300),
    "segmentation": Task(lambda: UNet(32), lambda: Scenes(16, 512), "iou", 16, 128, is_short_of_memory=True),
}


class Meter(pl.Callback):
    """Seconds of the training loop behind the warm-up, without validation; and the highest memory above the start."""

    def __init__(self) -> None:
        self._probe = HostProbe()
        self._begun: float | None = None
        self._validating = self._validated = 0.0
        self.steps = 0
        self.seconds = 0.0
        self.bytes = 0
        self._at_start = self._probe.read().used_bytes

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Counts."""
        now = time.perf_counter()
        if trainer.global_step < WARM_UP_STEPS:
            return
        if self._begun is None:
            self._begun = now
            self._probe.read()  # the peak counts from here
            return
        self.steps += 1
        self.seconds = now - self._begun - self._validated

    def on_validation_start(self, *args: Any) -> None:
        """Stops the clock."""
        self._validating = time.perf_counter()

    def on_validation_end(self, *args: Any) -> None:
        """Goes on."""
        if self._begun is not None:
            self._validated += time.perf_counter() - self._validating

    def on_train_end(self, *args: Any) -> None:
        """Reads the peak."""
        self.bytes = self._probe.read().used_bytes - self._at_start


def settings_of(contender: str, task: Task) -> tuple[list[pl.Callback], list[Any]]:
    """Callbacks and plugins."""
    if contender == "plain":
        return [], []
    monitors: list[pl.Callback] = [StepTrace(console=False), StragglerMonitor(), MemoryMonitor(), PerformanceReport()]
    if not task.is_short_of_memory:
        return [*monitors, OutOfMemoryRecovery()], [MemoryAwarePrecision()]
    probe = CallableProbe(lambda: MemoryReading(95, 100))
    saving = [ActivationCheckpointing(budget=0.5), OutOfMemoryRecovery()]
    return [*monitors, *saving], [MemoryAwarePrecision(probe=probe, check_every_n_steps=1)]


def main() -> None:
    """Trains, and prints samples a second, peak memory and the final metric."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--contender", choices=("plain", "hpc"), required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    task = TASKS[arguments.task]
    pl.seed_everything(arguments.seed, verbose=False)
    callbacks, plugins = settings_of(arguments.contender, task)
    data = task.data()
    if arguments.contender == "hpc":
        data = SharedMemoryDataModule(datamodule=data)
    meter = Meter()
    steps = arguments.steps or task.steps
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            callbacks=[meter, *callbacks],
            plugins=plugins,
            logger=False,
            num_sanity_val_steps=0,
            limit_val_batches=20,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        model = task.model()
        trainer.fit(model, data)
        (found,) = trainer.validate(model, data, verbose=False)
    rate = meter.steps * task.batch_size / meter.seconds
    print(json.dumps({"samples_per_second": rate, "bytes": meter.bytes, "metric": found[task.metric]}))


if __name__ == "__main__":
    main()
