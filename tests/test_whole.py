"""All parts together, over two nodes of two ranks, with resume: strategy with a codec, precision, data, callbacks."""

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hpc.callbacks import (
    ActivationCheckpointing,
    AllocatorPool,
    MemoryMonitor,
    MicroBatchFinder,
    OutOfMemoryRecovery,
    PerformanceReport,
    ProfilerWindow,
    StepTrace,
    StragglerMonitor,
)
from lightning_hpc.data import SharedMemoryDataModule
from lightning_hpc.memory import CallableProbe, MemoryReading
from lightning_hpc.precision import MemoryAwarePrecision
from lightning_hpc.strategies import HPCStrategy
from lightning_hpc.trace import diagnose, read_traces
from tests.helpers import run_ranks

ROOT = Path(__file__).parents[1]
WIDTH = 32
SAMPLES = 240
EFFECTIVE = 24
EPOCHS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.layers(x))


class Model(pl.LightningModule):
    """Blocks that may be recomputed and switched; without random numbers, which Lightning's checkpoints do not hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        loss = (self.blocks(x) - x.flip(1)).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("error", (self.blocks(batch[0]) - batch[0].flip(1)).abs().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def dataset() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)))


class Pressure:
    """Memory that is nearly full from a step on, and calm again later."""

    trainer: pl.Trainer | None = None

    def read(self) -> MemoryReading:
        step = 0 if self.trainer is None else self.trainer.global_step
        return MemoryReading(95 if 4 <= step < 12 else 10, 100)


def fit(rank: int, world_size: int, folder: Path, name: str, ckpt_path: Path | None) -> Any:
    """One run; returns the weights' sum, what was trained on, and what the parts did."""
    warnings.simplefilter("ignore")
    pl.seed_everything(7, verbose=False)
    pressure = Pressure()
    plugin = MemoryAwarePrecision(probe=CallableProbe(pressure.read), check_every_n_steps=2)
    finder = MicroBatchFinder(EFFECTIVE, max_batch_size=3, probe=CallableProbe(lambda: MemoryReading(1, 100)))
    checkpointing = ActivationCheckpointing(budget=0.6)
    report = PerformanceReport()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=HPCStrategy(topology=[[0, 1], [2, 3]], compression="int8"),
        plugins=[plugin],
        callbacks=[
            StepTrace(folder / name, console=False),
            StragglerMonitor(),
            MemoryMonitor(2),
            report,
            ProfilerWindow(steps=[3], length=1),
            AllocatorPool(),
            finder,
            checkpointing,
            OutOfMemoryRecovery(),
            ModelCheckpoint(folder / name / "checkpoints", every_n_train_steps=7, save_top_k=-1, filename="{step}"),
        ],
        max_epochs=EPOCHS,
        val_check_interval=0.5,
        num_sanity_val_steps=0,
        logger=False,
        default_root_dir=folder / name,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    pressure.trainer = trainer
    model = Model()
    data = SharedMemoryDataModule(dataset(), dataset(), num_workers=1)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    stats = trainer.strategy.comm_stats  # type: ignore[attr-defined]
    return {
        "weights": torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]),
        "steps": trainer.global_step,
        "batch_size": finder.batch_size,
        "switches": [(switch.step, switch.units, switch.to_low) for switch in plugin.switches],
        "plan": None if checkpointing.plan is None else checkpointing.plan.blocks,
        "report": None if report.path is None else report.path.name,
        "levels": sorted(stats.bytes_sent),
    }


def test_two_nodes_of_two_ranks_and_a_resume_that_is_bitwise(tmp_path: Path) -> None:
    whole = run_ranks(fit, 4, tmp_path, "whole", None, init_gloo=False, timeout=170)
    steps = EPOCHS * math.ceil(SAMPLES / EFFECTIVE)
    for rank, result in enumerate(whole):
        assert torch.equal(result["weights"], whole[0]["weights"])
        assert (result["steps"], result["batch_size"]) == (steps, 3)
        assert result["switches"] == whole[0]["switches"] != []
        assert result["plan"] == whole[0]["plan"]
        assert result["report"] == ("report.html" if rank == 0 else None)
        assert result["levels"] == whole[0]["levels"]
    assert any(to_low for _, _, to_low in whole[0]["switches"])
    traces = read_traces(tmp_path / "whole" / "attempt_000")
    assert len(traces) == 4
    assert {len(trace.steps) for trace in traces} == {steps * EFFECTIVE // (4 * 3)}
    assert diagnose(traces).ranks == 4
    names = {event["name"] for trace in traces for event in trace.events}
    assert {"precision_switch", "activation_checkpointing", "profile"} <= names
    # In the middle of the second epoch.
    checkpoint = tmp_path / "whole" / "checkpoints" / "step=14.ckpt"
    resumed = run_ranks(fit, 4, tmp_path, "resumed", checkpoint, init_gloo=False, timeout=170)
    for result in resumed:
        assert torch.equal(result["weights"], whole[0]["weights"])
        assert (result["steps"], result["batch_size"]) == (steps, 3)


class Data(pl.LightningDataModule):
    """A DataModule of a user's."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(dataset(), batch_size=self.batch_size)


def part(kind: type, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"{kind.__module__}.{kind.__name__}", "init_args": arguments}


def test_a_yaml_file_with_every_part(tmp_path: Path) -> None:
    callbacks = [
        part(StepTrace, dirpath=str(tmp_path / "trace")),
        part(StragglerMonitor),
        part(MemoryMonitor, interval=5),
        part(PerformanceReport, dirpath=str(tmp_path / "report")),
        part(ProfilerWindow, steps=[3], length=1),
        part(AllocatorPool, headroom=0.2),
        part(MicroBatchFinder, effective_batch_size=24, max_batch_size=6),
        part(ActivationCheckpointing, budget=0.6),
        part(OutOfMemoryRecovery),
    ]
    trainer = {
        "accelerator": "cpu",
        "devices": 2,
        "max_steps": 12,
        "limit_val_batches": 2,
        "logger": False,
        "enable_progress_bar": False,
        "default_root_dir": str(tmp_path),
        "strategy": part(HPCStrategy, topology=[[0], [1]], compression="bf16"),
        "plugins": [part(MemoryAwarePrecision, dtype="bf16")],
        "callbacks": callbacks,
    }
    config = {
        "seed_everything": 1,
        "trainer": trainer,
        "model": part(Model),
        "data": part(SharedMemoryDataModule, datamodule=part(Data, batch_size=2), num_workers=1),
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    command = [str(Path(sys.executable).with_name("lightning-hpc")), "fit", "--config", str(tmp_path / "job.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "MicroBatchFinder: batch_size=6 on each of 2 ranks with accumulate_grad_batches=2" in done.stderr
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    assert content["headline"]["optimizer_steps"] == 12
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1]
