"""Precision and recovery on a CUDA device: the same as on the CPU, and memory that is really lower."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_hpc.callbacks import ActivationCheckpointing, OutOfMemoryRecovery
from lightning_hpc.memory.out_of_memory import TrainingOutOfMemoryError
from lightning_hpc.precision import MemoryAwarePrecision
from tests.callbacks.failing_models import Arm, Failing, Faults
from tests.callbacks.test_step_trace import make_trainer
from tests.memory.block_models import equal
from tests.precision.plugin_models import CALM, HIGH, Module, everything, fit, make_plugin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = {"accelerator": "cuda", "devices": 1}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_without_pressure_all_is_bitwise_that_of_float32(dtype: Any) -> None:
    plain = everything(fit(Module(), precision="32-true", **CUDA))
    assert equal(plain, everything(fit(Module(), plugin=make_plugin([CALM], dtype), **CUDA)))


@pytest.mark.parametrize("place", ["forward", "backward", "optimizer"])
def test_a_failed_step_is_undone_on_the_device_too(place: Any) -> None:
    faults, recovery = Faults(), OutOfMemoryRecovery()
    trainer = make_trainer(recovery, Arm(faults, 4, place), plugins=[make_plugin([CALM])], max_steps=8, **CUDA)
    trainer.fit(Failing(faults))
    assert recovery.recoveries == 1


class Wide(pl.LightningModule):
    """Blocks whose activations are large beside their weights."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8))
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.blocks(torch.ones(self.rows, 256, device=self.device)).square().mean()  # type: ignore[no-any-return]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(64, 1), batch_size=8)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class LastPeak(pl.Callback):
    bytes = 0

    def on_train_batch_start(self, *_: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, *_: Any) -> None:
        self.bytes = torch.cuda.max_memory_allocated()


def test_memory_is_lower_under_pressure_and_lower_still_with_blocks_recomputed() -> None:
    peaks = []
    for callbacks, plugins in (
        ([], []),
        ([], [make_plugin([HIGH])]),
        ([ActivationCheckpointing(budget=0.3)], [make_plugin([HIGH])]),
    ):
        last = LastPeak()
        make_trainer(*callbacks, last, plugins=plugins, max_steps=8, **CUDA).fit(Wide(2**15))
        peaks.append(last.bytes)
    assert peaks[1] < 0.7 * peaks[0]
    assert peaks[2] < 0.6 * peaks[1]


def test_a_real_shortage_is_recovered_from_or_ends_with_advice() -> None:
    last = LastPeak()
    make_trainer(last, max_steps=3, **CUDA).fit(Wide(2**15))
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    warnings.simplefilter("ignore")
    try:
        torch.cuda.set_per_process_memory_fraction(0.8 * last.bytes / total)
        recovery = OutOfMemoryRecovery()
        plugin = MemoryAwarePrecision()
        make_trainer(recovery, plugins=[plugin], max_steps=4, **CUDA).fit(Wide(2**15))
        assert recovery.recoveries >= 1 or plugin.low_modules != []
        torch.cuda.set_per_process_memory_fraction(0.05 * last.bytes / total)
        with pytest.raises(TrainingOutOfMemoryError, match="In this order, try"):
            make_trainer(OutOfMemoryRecovery(), max_steps=4, **CUDA).fit(Wide(2**15))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
