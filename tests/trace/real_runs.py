"""Short real fits with a bottleneck planted by sleeping, recorded by `StepTrace`."""

import multiprocessing
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.futures import Future
from torch.utils.data import DataLoader, Dataset

from lightning_hpc.callbacks import StepTrace
from lightning_hpc.comm.pipeline import ThreadPipeline
from lightning_hpc.strategies import HPCStrategy
from lightning_hpc.trace import Trace, read_traces

PLACES = ("data", "growth", "spikes", "optimizer", "memory", "framework", "communication")
"""Where `Plan.share` may be planted; growth, spikes and optimizer are ways in which compute can be the bottleneck."""


@dataclass(frozen=True)
class Plan:
    """One fit.

    Attributes:
        place: One of `PLACES`; for a straggler ``data``, ``forward``, ``optimizer`` or ``framework``; "" for nothing.
        share: Part of the time that the plant is to take, 0 to 1.
        width: Units of a layer.
        batch: Rows of a batch.
        steps: Batches.
        ranks: Processes.
        every: Plant in every n-th step only, as much more in each.
        straggler: The rank that is planted in. None plants in all.
        is_noisy: Whether another process burns the processor by turns.
        adam: Whether the optimizer is Adam, not SGD.
    """

    place: str
    share: float
    width: int = 256
    batch: int = 256
    steps: int = 28
    ranks: int = 1
    every: int = 1
    straggler: int | None = None
    is_noisy: bool = False
    adam: bool = False


class _Rows(Dataset[Tensor]):
    def __init__(self, count: int, width: int) -> None:
        self._count = count
        self._row = torch.randn(width)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return self._row


class _Plant:
    """Sleeps for its part of a step, in one place, and adds up for how long."""

    def __init__(self, plan: Plan, seconds: float) -> None:
        self._plan = plan
        self._seconds = seconds
        self.step = 0
        self.by_step: dict[int, float] = {}

    def __call__(self, place: str) -> None:
        plan = self._plan
        seconds = self._seconds * plan.every * (self.step % plan.every == 0)
        if plan.place in ("spikes", "memory"):
            seconds = 4 * self._seconds * (self.step % 4 == 3)
        elif plan.place == "growth":
            seconds = 2 * self._seconds * self.step / plan.steps
        wanted = {"growth": "forward", "spikes": "forward", "memory": "forward"}.get(plan.place, plan.place)
        if place != wanted or seconds <= 0:
            return
        begun = time.perf_counter()
        time.sleep(seconds)
        self.by_step[self.step] = self.by_step.get(self.step, 0.0) + time.perf_counter() - begun


class _Model(pl.LightningModule):
    def __init__(self, plan: Plan, plant: _Plant) -> None:
        super().__init__()
        layers = [module for _ in range(4) for module in (torch.nn.Linear(plan.width, plan.width), torch.nn.ReLU())]
        self.layers = torch.nn.Sequential(*layers)
        self._plan = plan
        self._plant = plant

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._plant("forward")
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return (torch.optim.Adam if self._plan.adam else torch.optim.SGD)(self.parameters(), lr=1e-4)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self._plant("optimizer")


class _PlantingCallback(pl.Callback):
    def __init__(self, plant: _Plant) -> None:
        self._plant = plant

    def on_train_batch_start(self, *args: Any) -> None:
        self._plant("framework")

    def on_train_batch_end(self, *args: Any) -> None:
        self._plant.step += 1


def _fit(plan: Plan, steps: int, seconds: float, dirpath: Path, rank: int) -> _Plant:
    plant = _Plant(plan, seconds if plan.straggler in (None, rank) else 0.0)

    def collate(rows: list[Tensor]) -> Tensor:
        plant("data")
        return torch.stack(rows)

    loader: DataLoader[Tensor] = DataLoader(
        _Rows(plan.batch * steps * plan.ranks, plan.width), plan.batch, collate_fn=collate
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=plan.ranks,
        strategy=HPCStrategy(topology=[[each] for each in range(plan.ranks)]) if plan.ranks > 1 else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[StepTrace(dirpath, console=False), _PlantingCallback(plant)],
    )
    with _slow_link(plant):
        trainer.fit(_Model(plan, plant), loader)
    return plant


@contextmanager
def _slow_link(plant: _Plant) -> Iterator[None]:
    submit = ThreadPipeline.submit

    def submit_slowly(*args: Any) -> Future[Tensor]:
        def finish(future: Future[Tensor]) -> Tensor:
            plant("communication")
            return future.value()

        return submit(*args).then(finish)

    ThreadPipeline.submit = submit_slowly  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ThreadPipeline.submit = submit  # type: ignore[method-assign]


def record_rank(rank: int, world_size: int, plan: Plan, dirpath: Path) -> dict[int, float]:
    """Records one rank of a run. Returns the seconds slept by step."""
    warnings.simplefilter("ignore")
    seconds = 0.0
    if plan.place:
        _fit(Plan("", 0.0, plan.width, plan.batch, ranks=plan.ranks, adam=plan.adam), 12, 0.0, dirpath / "base", rank)
        # The same figure on all ranks: that of rank 0, which all can read after the fit.
        traces = read_traces(dirpath / "base")
        times = sorted(step["total_ms"] for step in traces[0].steps[3:])
        seconds = times[len(times) // 2] / 1e3 * plan.share / (1 - plan.share)
    return _fit(plan, plan.steps, seconds, dirpath / "run", rank).by_step


def record(plan: Plan, run_ranks: Callable[..., list[Any]] | None = None) -> tuple[list[Trace], list[dict[int, float]]]:
    """Records one run.

    Args:
        plan: What to train and what to plant.
        run_ranks: `tests.helpers.run_ranks`, where the plan has several ranks.

    Returns:
        The traces, and the seconds slept by step, both by rank.
    """
    burner = multiprocessing.get_context("spawn").Process(target=_burn, daemon=True) if plan.is_noisy else None
    if burner is not None:
        burner.start()
    try:
        with tempfile.TemporaryDirectory() as directory:
            if plan.ranks == 1:
                slept = [record_rank(0, 1, plan, Path(directory))]
            else:
                assert run_ranks is not None
                slept = run_ranks(record_rank, plan.ranks, plan, Path(directory), init_gloo=False, timeout=170)
            return read_traces(Path(directory) / "run"), slept
    finally:
        if burner is not None:
            burner.kill()
            burner.join()


def _burn() -> None:
    rng = random.Random(0)
    while True:
        until = time.perf_counter() + rng.uniform(0.001, 0.05)
        while time.perf_counter() < until:
            pass
        time.sleep(rng.uniform(0.001, 0.05))
