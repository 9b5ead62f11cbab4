"""Real runs for the gate: a tiny training under StepTrace, while a neighbour burns the processor irregularly."""

import logging
import math
import multiprocessing
import random
import time
import warnings
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hpc.callbacks import StepTrace

_RUN_SECONDS = 120


class _Perceptron(pl.LightningModule):
    """Steps of about two milliseconds; with ``burn`` seconds of processor time more in forward."""

    def __init__(self, burn: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(256, 256), nn.ReLU())])
        self.burn = burn

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).square().mean()
        end = time.thread_time() + self.burn
        while self.burn and time.thread_time() < end:
            pass
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def record(directory: Path, runs: int, steps: int, burn: float, seed: int) -> None:
    """Records runs one after the other, in turns: equal, equal, slower; names end with their kind.

    Args:
        directory: Where to.
        runs: How many.
        steps: Of each run.
        burn: Seconds of processor time that the slower ones burn more in each forward.
        seed: Of the neighbour.
    """
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    neighbour = context.Process(target=_burn_irregularly, args=(seed, stop), daemon=True)
    neighbour.start()
    try:
        for number in range(runs):
            kind = ("equal_a", "equal_b", "slower")[number % 3]
            arguments = (directory / f"{number:05d}_{kind}", steps, burn if kind == "slower" else 0.0)
            run = context.Process(target=_fit, args=arguments)
            run.start()
            run.join(_RUN_SECONDS)
            if run.is_alive():  # its file is short, and left out
                run.kill()
                run.join()
    finally:
        stop.set()
        neighbour.join()


def _fit(directory: Path, steps: int, burn: float) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(64 * 50, 256)), batch_size=64)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[StepTrace(directory, console=False)],
    )
    trainer.fit(_Perceptron(burn), loader)


def _burn_irregularly(seed: int, stop: Event) -> None:
    """Bursts of 50 ms to 4 s that copy memory, and pauses of 50 ms to 6 s."""
    generator = random.Random(seed)
    block = np.ones(1 << 20)
    with suppress(KeyboardInterrupt):
        while not stop.is_set():
            end = time.monotonic() + math.exp(generator.uniform(math.log(0.05), math.log(4)))
            while time.monotonic() < end:
                block.copy()
            stop.wait(math.exp(generator.uniform(math.log(0.05), math.log(6))))
