import copy
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hpc.callbacks import ActivationCheckpointing, MicroBatchFinder, OutOfMemoryRecovery, StepTrace
from lightning_hpc.callbacks.micro_batch_finder import _require_steps
from lightning_hpc.data import SharedMemoryDataModule
from lightning_hpc.memory import CallableProbe, MemoryReading
from lightning_hpc.precision import MemoryAwarePrecision
from tests.callbacks.test_step_trace import make_trainer
from tests.helpers import run_ranks
from tests.memory.block_models import equal

WIDTH = 8


def samples() -> TensorDataset:
    return TensorDataset(torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(1)))


class Model(pl.LightningModule):
    """Draws random numbers, has running statistics and a metric, and logs.

    Args:
        batch_size: Of its loader.
        most: Samples of the largest batch for which there is memory.
        place: Where a larger one fails.
        schedules: Whether it has a scheduler that asks for the number of steps.
    """

    def __init__(self, batch_size: int = 1, most: int = 1000, place: str = "forward", schedules: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.batch_size = batch_size
        self.most, self.place, self.schedules = most, place, schedules
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1))
        self.register_buffer("running", torch.zeros(WIDTH))
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        noise = 0.01 * torch.randn_like(x) + 0.01 * random.random() + 0.01 * np.random.rand()
        out = self.layers(x + noise)
        self.running += out.detach().mean(dim=0)  # type: ignore[operator]
        self.error(out, x)
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("loss", out.mean(), sync_dist=True)
        loss = (out - x).square().mean()
        if len(x) > self.most:
            if self.place == "backward":
                loss.register_hook(lambda _: self.fail())
            elif self.place == "forward":
                self.fail()
        self.last_size = len(x)
        return loss

    def fail(self) -> None:
        raise torch.OutOfMemoryError("tried to allocate too much")

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=0.01)
        optimizer.module = self
        if not self.schedules:
            return optimizer
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=self.batch_size, shuffle=True, drop_last=True)


class Adam(torch.optim.AdamW):
    module: Model
    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        with torch.enable_grad():
            loss = closure()
        if self.module.place == "optimizer" and self.module.last_size > self.module.most:
            self.module.fail()
        super().step()
        return loss


class Sizes(pl.Callback):
    """What the fit trains on, and all that a run leaves behind after each step."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.states: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))
        self.states.append(
            {
                "parameters": [parameter.detach().clone() for parameter in pl_module.parameters()],
                "buffers": [buffer.clone() for buffer in pl_module.buffers()],
                "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in trainer.optimizers],
                "optimizer steps": [getattr(each, "steps", None) for each in trainer.optimizers],
                "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": np.random.get_state()[1].tolist(),
                "logged": {name: value.clone() for name, value in trainer.callback_metrics.items()},
                "steps": (trainer.global_step, trainer.accumulate_grad_batches),
            }
        )


def calm() -> CallableProbe:
    return CallableProbe(lambda: MemoryReading(10, 100))


def run(model: Any, *callbacks: pl.Callback, datamodule: Any = None, **kwargs: Any) -> Sizes:
    pl.seed_everything(3, verbose=False)
    record = Sizes()
    kwargs = {"max_epochs": 2, **kwargs}
    make_trainer(*callbacks, record, **kwargs).fit(model, datamodule=datamodule)
    return record


@pytest.mark.parametrize("place", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize(("effective", "most", "found"), [(24, 7, 6), (24, 1000, 24), (24, 1, 1), (7, 5, 1), (1, 1, 1)])
def test_the_fit_is_bitwise_one_that_had_the_size_from_the_start(
    place: str, effective: int, most: int, found: int
) -> None:
    finder = MicroBatchFinder(effective, probe=calm())
    others = run(Model(most=most, place=place), finder)
    assert finder.batch_size == found
    assert set(others.sizes) == {found}
    reference = run(Model(batch_size=found), accumulate_grad_batches=effective // found)
    assert equal(reference.states, others.states)


@pytest.mark.filterwarnings("ignore:ActivationCheckpointing cannot get below")
@pytest.mark.parametrize("precision", ["bf16-mixed", "memory aware"])
def test_it_goes_with_the_other_parts(tmp_path: Path, precision: str) -> None:
    def parts() -> dict[str, Any]:
        if precision == "memory aware":
            return {"plugins": [MemoryAwarePrecision(probe=CallableProbe(lambda: MemoryReading(80, 100)))]}
        return {"precision": precision}

    def callbacks(name: str) -> list[pl.Callback]:
        checkpointing = ActivationCheckpointing(blocks=["Linear"], budget=0.9)
        return [StepTrace(tmp_path / name, console=False), OutOfMemoryRecovery(), checkpointing]

    others = run(Model(most=10), MicroBatchFinder(24, probe=calm()), *callbacks("a"), **parts())
    reference = run(Model(batch_size=8), *callbacks("b"), accumulate_grad_batches=3, **parts())
    assert equal(reference.states, others.states)


class Data(pl.LightningDataModule):
    """Makes its loader from a hyperparameter."""

    def __init__(self, batch_size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=self.hparams["batch_size"], shuffle=True)


class WithoutLoader(Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        del self.batch_size

    train_dataloader = pl.LightningModule.train_dataloader


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize("settings", [{"limit_train_batches": 6}, {"limit_train_batches": 0.5}, {"max_steps": 3}])
def test_schedulers_are_told_the_number_of_steps_of_the_size_that_is_found(settings: dict[str, Any]) -> None:
    others = run(Model(most=10), MicroBatchFinder(24, probe=calm()), **settings)
    assert equal(run(Model(batch_size=8), accumulate_grad_batches=3, **settings).states, others.states)


class OddlyMany(Model):
    """Loses another part of an epoch with every batch size."""

    def train_dataloader(self) -> Any:
        data = TensorDataset(samples().tensors[0][:95])
        return DataLoader(data, batch_size=self.batch_size, shuffle=True, drop_last=True)


def test_schedulers_are_told_of_dropped_samples() -> None:
    others = run(OddlyMany(most=10), MicroBatchFinder(24, probe=calm()))
    assert equal(run(OddlyMany(batch_size=8), accumulate_grad_batches=3).states, others.states)


@pytest.mark.parametrize("kind", ["hyperparameter", "own", "own with workers", "wrapped"])
def test_datamodules(kind: str) -> None:
    def make(size: int) -> pl.LightningDataModule:
        if kind == "hyperparameter":
            return Data(size)
        if kind == "wrapped":
            return SharedMemoryDataModule(datamodule=Data(size), num_workers=0)
        return SharedMemoryDataModule(samples(), batch_size=size, num_workers=2 if "workers" in kind else 0)

    finder = MicroBatchFinder(24, probe=calm())
    others = run(WithoutLoader(most=10), finder, datamodule=make(1))
    assert finder.batch_size == 8
    reference = run(WithoutLoader(), datamodule=make(8), accumulate_grad_batches=3)
    assert equal(reference.states, others.states)


def test_a_generator_of_the_loader_is_put_back() -> None:
    class Own(Model):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.generator = torch.Generator().manual_seed(5)

        def train_dataloader(self) -> Any:
            return DataLoader(samples(), batch_size=self.batch_size, shuffle=True, generator=self.generator)

    others = run(Own(most=10, schedules=False), MicroBatchFinder(24, probe=calm()))
    assert equal(run(Own(batch_size=8, schedules=False), accumulate_grad_batches=3).states, others.states)


def test_a_tenth_of_the_memory_stays_free() -> None:
    model = Model()
    sizes: list[int] = []
    training_step = model.training_step

    def step(batch: Any, batch_idx: int) -> Tensor:
        sizes.append(len(batch[0]))
        return training_step(batch, batch_idx)

    model.training_step = step  # type: ignore[method-assign]

    def read() -> MemoryReading:
        return MemoryReading(100 + 40 * (sizes[-1] if sizes else 0), 1000)

    finder = MicroBatchFinder(96, probe=CallableProbe(read), max_batch_size=48)
    run(model, finder, max_epochs=1)
    # 100 + 40 x 16 is below 900, and 100 + 40 x 24 above all of it.
    assert finder.batch_size == 16
    with_budget = MicroBatchFinder(96, probe=CallableProbe(read), budget_bytes=500)
    sizes.clear()
    run(model, with_budget, max_epochs=1)
    assert with_budget.batch_size == 8


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing fits", "not even 1 samples fit .ran out of memory.*try: precision='bf16-mixed'"),
        ("another error", "planted"),
        ("ignored", "with batch_size=1 the training loader gives batches of 4 samples"),
        ("short", "not even 64 samples fit .the training loader has fewer samples"),
        ("accumulates", "accumulate_grad_batches=2 is set"),
        ("schedules", "accumulate_grad_batches=1 is set, or scheduled"),
        ("manual", "with manual optimization"),
        ("no attribute", "neither WithoutLoader nor its DataModule has an attribute or hyperparameter batch_size"),
        ("no size", "no size from min_batch_size=5 to max_batch_size=5 divides the 24 samples"),
        ("unknown", "does not say how large its batches are"),
    ],
)
def test_what_does_not_go_is_said(kind: str, message: str) -> None:
    model, arguments, settings = Model(), dict[str, Any](effective_batch_size=24), dict[str, Any]()
    if kind == "nothing fits":
        model.most = 0
    elif kind == "another error":
        model.training_step = lambda *_: _raise()  # type: ignore[method-assign]
    elif kind == "ignored":
        model.train_dataloader = lambda: DataLoader(samples(), batch_size=4)  # type: ignore[method-assign]
    elif kind == "short":
        arguments = {"effective_batch_size": 64, "min_batch_size": 64}
        model.train_dataloader = lambda: DataLoader(  # type: ignore[method-assign]
            TensorDataset(torch.randn(32, WIDTH)), batch_size=model.batch_size
        )
    elif kind == "accumulates":
        settings["accumulate_grad_batches"] = 2
    elif kind == "manual":
        model.automatic_optimization = False
    elif kind == "no attribute":
        model = WithoutLoader()
        model.train_dataloader = lambda: DataLoader(samples())  # type: ignore[method-assign]
    elif kind == "no size":
        arguments |= {"min_batch_size": 5, "max_batch_size": 5}
    elif kind == "unknown":
        model.train_dataloader = lambda: [["a"], ["b"]]  # type: ignore[method-assign]
    extra = [GradientAccumulationScheduler({0: 2})] if kind == "schedules" else []
    with pytest.raises(ValueError, match=message):
        run(model, MicroBatchFinder(probe=calm(), **arguments), *extra, **settings)


def _raise() -> Any:
    raise ValueError("planted")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"effective_batch_size": 0}, "effective_batch_size=0"),
        ({"effective_batch_size": 2.5}, "effective_batch_size=2.5"),
        ({"effective_batch_size": 8, "min_batch_size": 0}, "min_batch_size=0"),
        ({"effective_batch_size": 8, "min_batch_size": 4, "max_batch_size": 2}, "max_batch_size=2 is less than"),
        ({"effective_batch_size": 8, "min_batch_size": 9}, "max_batch_size=8 is less than min_batch_size=9"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MicroBatchFinder(**arguments)


def test_loaders_that_are_given_are_refused() -> None:
    with pytest.raises(ValueError, match="fit was given a training loader"):
        make_trainer(MicroBatchFinder(8)).fit(Model(), DataLoader(samples()))


@pytest.mark.parametrize(
    "setting",
    [{"fast_dev_run": 1}, {"overfit_batches": 1}, {"limit_train_batches": 0}],
    ids=["fast", "overfit", "none"],
)
def test_it_tries_nothing_where_there_is_little_to_train(setting: dict[str, Any]) -> None:
    finder = MicroBatchFinder(24, probe=calm())
    record = run(Model(batch_size=4, schedules=False), finder, **setting)
    assert finder.batch_size is None
    assert set(record.sizes) <= {4}


@pytest.mark.parametrize("drop_last", [True, False])
def test_no_batch_is_larger_than_the_dataset(drop_last: bool) -> None:
    model, finder = Model(schedules=False), MicroBatchFinder(64, probe=calm())
    data = TensorDataset(torch.randn(33, WIDTH))
    model.train_dataloader = lambda: DataLoader(data, batch_size=model.batch_size, drop_last=drop_last)  # type: ignore[method-assign]
    run(model, finder, max_epochs=1)
    assert finder.batch_size == 32


def test_a_short_batch_is_not_what_is_tried() -> None:
    tried: list[int] = []

    class Noting(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            tried.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    model = Noting(schedules=False)
    data = TensorDataset(torch.randn(33, WIDTH))
    model.train_dataloader = lambda: DataLoader(data, batch_size=model.batch_size)  # type: ignore[method-assign]
    run(model, MicroBatchFinder(32, probe=calm(), min_batch_size=32), max_epochs=1)
    assert tried == [32, 32, 32, 1]  # the trial, and the fit


class Weights(pl.LightningModule):
    """Takes far more memory for its parameters than for a sample.

    Args:
        sizes: Gets the sizes of its batches; a tuple keeps trials from taking them out again.
    """

    def __init__(self, *sizes: list[int]) -> None:
        super().__init__()
        self.batch_size = 1
        self.layer = nn.Linear(1024, 1024)
        self.sizes = sizes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        self.sizes[0].append(len(x))
        return self.layer(x).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(256, 1024)), batch_size=self.batch_size)


@pytest.mark.parametrize(("limit", "found", "tries_more"), [(40.0, 254, True), (22.5, 2, False)])
def test_on_the_cpu_what_would_take_too_much_is_not_tried(limit: float, found: int, tries_more: bool) -> None:
    mebibyte = 2**20
    sizes: list[int] = []

    def read() -> MemoryReading:
        # Of each parameter there are its value and copy, its gradient, and Adam's two moments; a sample takes a 25th.
        taken = 20 * mebibyte + 5 * 2**12 + sizes[-1] * mebibyte // 25 if sizes else 4 * mebibyte
        return MemoryReading(taken, int(limit * mebibyte))

    finder = MicroBatchFinder(254, probe=CallableProbe(read))
    run(Weights(sizes), finder, max_epochs=1, limit_train_batches=1)
    assert finder.batch_size == found
    assert (127 in sizes) == tries_more


def test_a_resumed_fit_tries_nothing_and_goes_on_alike(tmp_path: Path) -> None:
    whole = run(Model(most=10, schedules=False), MicroBatchFinder(24, probe=calm()))
    model = Model(most=10, schedules=False)
    pl.seed_everything(3, verbose=False)
    trainer = make_trainer(MicroBatchFinder(24, probe=calm()), Sizes(), max_epochs=1)
    trainer.fit(model)
    assert trainer.accumulate_grad_batches == 1  # as before the fit
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    finder, record = MicroBatchFinder(24, probe=CallableProbe(_raise)), Sizes()
    make_trainer(finder, record, max_epochs=2).fit(Model(schedules=False), ckpt_path=tmp_path / "a.ckpt")
    assert finder.batch_size == 8
    assert set(record.sizes) == {8}
    assert record.states[-1]["steps"] == whole.states[-1]["steps"]


def test_a_second_fit_searches_anew() -> None:
    finder = MicroBatchFinder(24, probe=calm())
    trainer = make_trainer(finder, max_epochs=1)
    trainer.fit(Model(most=10))
    assert finder.batch_size == 8
    trainer.fit(Model(most=3))
    assert finder.batch_size == 3


def fit_on_ranks(rank: int, world_size: int, strategy: str, kind: str) -> Any:
    most = {"rank 1 has less": [10, 5], "rank 0 has less": [5, 10]}.get(kind, [100, 100])[rank]
    model = Model(most=most)
    if kind == "rank 1 fails" and rank:
        model.training_step = lambda *_: _raise()  # type: ignore[method-assign]
    finder, record = MicroBatchFinder(48, probe=calm()), Sizes()
    try:
        pl.seed_everything(3, verbose=False)
        trainer = make_trainer(finder, record, devices=world_size, strategy=strategy, max_epochs=1)
        trainer.fit(model)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return finder.batch_size, set(record.sizes), record.states[-1]["steps"]


class RarelyUsed(Model):
    """Has a layer that takes part in the second batch only."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rare = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.rare(batch[0]).mean() if batch_idx == 1 else loss


def fit_on_ranks_twice(rank: int, world_size: int, strategies: list[str]) -> list[bool]:
    def fit(strategy: str, model: Model, *callbacks: pl.Callback, **kwargs: Any) -> Any:
        return run(model, *callbacks, devices=world_size, strategy=strategy, max_epochs=1, **kwargs).states

    alike = []
    for strategy in strategies:
        kind, accumulate = (RarelyUsed, 1) if "unused" in strategy else (Model, 6)
        finder = MicroBatchFinder(8 * accumulate, probe=calm(), min_batch_size=2)
        found = fit(strategy, kind(most=[5, 10][rank]), finder)
        reference = fit(strategy, kind(batch_size=4), accumulate_grad_batches=accumulate)
        alike.append(finder.batch_size == 4 and equal(reference, found))
    return alike


def test_fits_on_ranks_are_bitwise_those_that_had_the_size_from_the_start() -> None:
    strategies = ["ddp", "hpc", "ddp_find_unused_parameters_true"]
    assert run_ranks(fit_on_ranks_twice, 2, strategies, init_gloo=False) == [[True] * 3] * 2


@pytest.mark.parametrize("kind", ["static_graph", "SyncBatchNorm"])
def test_what_trials_would_break_on_ranks_is_refused(kind: str) -> None:
    module = nn.SyncBatchNorm(2) if kind == "SyncBatchNorm" else nn.Linear(2, 2)
    wrapper = SimpleNamespace(static_graph=kind == "static_graph")
    trainer = SimpleNamespace(
        optimizers=[None], world_size=2, strategy=SimpleNamespace(model=wrapper), lightning_module=module
    )
    with pytest.raises(ValueError, match=kind):
        _require_steps(trainer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("ddp", "rank 1 has less"), ("hpc", "rank 0 has less"), ("hpc", "both have enough"), ("ddp", "rank 1 fails")],
)
def test_ranks_agree(strategy: str, kind: str) -> None:
    results = run_ranks(fit_on_ranks, 2, strategy, kind, init_gloo=False)
    if kind == "rank 1 fails":
        assert results[1] == "planted"
        assert "another rank has failed with batch_size=1" in results[0]
    else:
        found = 24 if kind == "both have enough" else 4
        assert results == [(found, {found}, (2, 24 // found))] * 2


def test_samples_that_do_not_divide_by_the_ranks() -> None:
    with pytest.raises(ValueError, match="effective_batch_size=7 does not divide by 2 ranks"):
        MicroBatchFinder(7)._sizes(type("Trainer", (), {"world_size": 2})())
