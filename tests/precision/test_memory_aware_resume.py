"""A run that was stopped and resumed is to the bit the one that was not, at every level, with the pressure to come."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hpc.memory import CallableProbe, MemoryReading
from lightning_hpc.precision import MemoryAwarePrecision
from tests.callbacks.test_step_trace import make_trainer
from tests.memory.block_models import equal
from tests.precision.plugin_models import WIDTH, Manual, Module, everything

STEPS = 16
# What the memory holds from this optimizer step on, in percent: nothing is low, then some units, then all, then fewer.
FIRST_PRESSURE, SECOND_PRESSURE, CALM_AGAIN = 3, 6, 9


def percent(step: int) -> int:
    if step in (FIRST_PRESSURE, FIRST_PRESSURE + 1):
        return 91
    return 10 if step >= CALM_AGAIN else 95 if step >= SECOND_PRESSURE else 80


class Reseed(pl.Callback):
    """Lightning does not restore random states, so each step draws from its own."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        pl.seed_everything(1000 * trainer.current_epoch + batch_idx, verbose=False)


class SaveEach(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        path = self.folder / f"{trainer.global_step}.ckpt"
        is_end = trainer.global_step == trainer.max_steps
        if trainer.global_step and not path.exists() and not is_end:
            trainer.save_checkpoint(path)


def run(module: pl.LightningModule, dtype: Any, interval: int, *callbacks: Any, ckpt: Any = None, **more: Any) -> Any:
    def read() -> MemoryReading:
        # The limit is what the three blocks save, so that one of them makes a difference.
        return MemoryReading(percent(module.trainer.global_step) * 120, 12_000)

    plugin = MemoryAwarePrecision(dtype, probe=CallableProbe(read), check_every_n_steps=interval)
    pl.seed_everything(0, verbose=False)
    trainer = make_trainer(
        Reseed(), *callbacks, plugins=[plugin], **{"max_steps": STEPS, "limit_val_batches": 0, **more}
    )
    # The same batch again and again, since Lightning begins the epoch's data anew; the module adds noise to it.
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader([[batch]] * 60, batch_size=None), ckpt_path=ckpt)
    scaler = None if plugin.scaler is None else plugin.scaler.state_dict()
    policy = plugin.state_dict()
    return {"training": everything(trainer), "scaler": scaler, "policy": policy}, plugin


@pytest.mark.filterwarnings("ignore:MemoryAwarePrecision. all modules")
@pytest.mark.parametrize(
    ("make", "interval", "kwargs", "dtype"),
    [
        (Module, 1, {}, "bf16"),
        (Module, 1, {}, "fp16"),
        (Module, 3, {}, "fp16"),
        (Module, 2, {"accumulate_grad_batches": 2}, "fp16"),
        (Manual, 1, {"max_steps": 24}, "fp16"),
    ],
)
def test_resuming_after_any_step_is_bitwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, interval: int, kwargs: Any, dtype: Any
) -> None:
    monkeypatch.setattr("lightning_hpc.precision.memory_aware._PATIENCE", 2)
    whole, plugin = run(make(), dtype, interval, SaveEach(tmp_path), **kwargs)
    assert {switch.to_low for switch in plugin.switches} == {True, False}
    levels = set()
    for path in tmp_path.glob("*.ckpt"):
        step = int(path.stem)
        checkpoint = torch.load(path, weights_only=True)
        levels.add(len(checkpoint["MemoryAwarePrecision"]["lowered"]))
        if make is Manual and step % 3:
            continue  # gradients that wait for their optimizer are in no checkpoint
        resumed, later = run(make(), dtype, interval, ckpt=path, **kwargs)
        assert later.switches == [switch for switch in plugin.switches if switch.step >= step], step
        assert equal(whole, resumed), step
    assert {0, len(plugin.measured)} < levels, levels  # none, all, and something between
