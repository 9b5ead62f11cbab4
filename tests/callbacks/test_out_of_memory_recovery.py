import copy
import random
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_hpc.callbacks import ActivationCheckpointing, OutOfMemoryRecovery, StepTrace, out_of_memory_recovery
from lightning_hpc.memory import CallableProbe, MemoryReading
from lightning_hpc.memory.out_of_memory import TrainingOutOfMemoryError
from lightning_hpc.precision import MemoryAwarePrecision
from lightning_hpc.trace import read_traces
from tests.callbacks.failing_models import Arm, Failing, FailingManual, Faults, Place
from tests.callbacks.test_step_trace import assert_closed, make_trainer
from tests.memory.block_models import equal


class LowerBefore(pl.Callback):
    """Lowers a level before a batch, as a recovery from a failure in it does."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            if trainer.precision_plugin._controller is None:
                trainer.precision_plugin._begin_step()
            assert trainer.precision_plugin.lower_one_level() is not None


class Record(pl.Callback):
    """All that a run leaves behind after each batch."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        scaler = trainer.precision_plugin.scaler
        gradients = [parameter.grad for parameter in pl_module.parameters()]
        self.states.append(
            {
                "parameters": [parameter.detach().clone() for parameter in pl_module.parameters()],
                "gradients": [gradient if gradient is None else gradient.clone() for gradient in gradients],
                "buffers": [buffer.clone() for buffer in pl_module.buffers()],
                "optimizers": [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in trainer.optimizers],
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": np.random.get_state()[1].tolist(),
                "metric": [pl_module.error.sum_squared_error.clone(), pl_module.error.total.clone()],
                "logged": {name: value.clone() for name, value in trainer.callback_metrics.items()},
                "scaler": None if scaler is None else scaler.state_dict(),
                "seen": len(pl_module.seen),
                "low": trainer.precision_plugin.low_modules,
                "steps": trainer.global_step,
                "toggled": [parameter.requires_grad for parameter in pl_module.parameters()],
                "progress": str(trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress),
                "manual": str(trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress),
            }
        )


def calm_plugin(dtype: Any = "bf16") -> MemoryAwarePrecision:
    return MemoryAwarePrecision(dtype, probe=CallableProbe(lambda: MemoryReading(80, 100)), check_every_n_steps=3)


def run(model: Any, *callbacks: pl.Callback, dtype: Any = "bf16", **kwargs: Any) -> list[Any]:
    pl.seed_everything(0, verbose=False)
    module = model(next((each.faults for each in callbacks if isinstance(each, Arm)), Faults()))
    record = Record()
    trainer = make_trainer(*callbacks, record, plugins=[calm_plugin(dtype)], max_steps=8, **kwargs)
    trainer.fit(module)
    return [*record.states, {name: value.clone() for name, value in trainer.callback_metrics.items()}]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("place", ["forward", "backward", "optimizer", "state"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("batch", [0, 4, 5])
def test_a_step_that_failed_ends_as_if_it_had_begun_at_the_lower_level(
    place: Place, accumulate: int, batch: int, dtype: str
) -> None:
    if accumulate > 1 and place in ("optimizer", "state") and batch != 5:
        pytest.skip("no optimizer steps in this micro-batch")
    if place == "state" and batch > 2:
        pytest.skip("the state is made in the first step")
    settings = {"dtype": dtype, "accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0}
    recovery = OutOfMemoryRecovery()
    others = run(Failing, recovery, Arm(Faults(), batch, place), **settings)
    assert recovery.recoveries == 1
    assert others[batch]["low"] != []
    reference = run(Failing, LowerBefore(batch), **settings)
    assert equal(reference, others)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("batch", [0, 3, 4])
def test_manual_optimization_too(place: Place, batch: int, dtype: str) -> None:
    recovery = OutOfMemoryRecovery()
    others = run(FailingManual, recovery, Arm(Faults(), batch, place), dtype=dtype)
    assert recovery.recoveries == 1
    assert equal(run(FailingManual, LowerBefore(batch), dtype=dtype), others)


def test_the_callback_changes_nothing_where_nothing_fails() -> None:
    for model in (Failing, FailingManual):
        assert equal(run(model), run(model, OutOfMemoryRecovery()))
    assert equal(
        run(Failing, accumulate_grad_batches=3), run(Failing, OutOfMemoryRecovery(), accumulate_grad_batches=3)
    )


def test_memory_in_pieces_is_put_together_before_anything_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory_recovery, "_failed_for_pieces", lambda error, device: True)
    recovery = OutOfMemoryRecovery()
    states = run(Failing, recovery, Arm(Faults(), 2, "backward"))
    assert recovery.recoveries == 1
    assert states[-2]["low"] == []
    assert equal(run(Failing), states)
    # Once a step; then it goes on with less.
    assert run(Failing, OutOfMemoryRecovery(), Arm(Faults(), 2, "backward", times=2))[2]["low"] != []


def test_attempts_go_on_as_long_as_something_is_left_and_end_with_advice() -> None:
    recovery = OutOfMemoryRecovery()
    states = run(Failing, recovery, Arm(Faults(), 2, "forward", times=4))
    assert recovery.recoveries == 1
    assert len(states[2]["low"]) == 4
    with pytest.raises(TrainingOutOfMemoryError) as caught:
        run(Failing, OutOfMemoryRecovery(), Arm(Faults(), 2, "forward", times=5))
    text = str(caught.value)
    assert text.startswith("the process ran out of memory in step 2, and nothing is left that would make room: tried")
    order = ["a smaller batch", "mixed precision", "accumulate_grad_batches", "ActivationCheckpointing", "shards"]
    places = [text.index(each) for each in order]
    assert places == sorted(places)
    assert text.count(" MiB") == 5
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_without_the_plugin_blocks_are_recomputed() -> None:
    checkpointing, recovery = ActivationCheckpointing(budget=10**9, blocks=["Block"]), OutOfMemoryRecovery()
    faults = Faults()
    trainer = make_trainer(recovery, checkpointing, Arm(faults, 4, "backward"), max_steps=8)
    trainer.fit(Failing(faults))
    assert recovery.recoveries == 1
    assert checkpointing.plan is not None
    assert checkpointing.plan.blocks == ()


def test_nothing_to_make_room_with_is_told_at_once_with_figures_of_the_model() -> None:
    faults = Faults()
    trainer = make_trainer(OutOfMemoryRecovery(), Arm(faults, 1, "forward"))
    with pytest.raises(TrainingOutOfMemoryError, match=r"half of it saves about 0\.0 MiB") as caught:
        trainer.fit(Failing(faults))
    assert caught.value.__cause__ is not None


class StepsTooSoon(FailingManual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward(self.blocks(batch[0]).sum())
        first.step()
        self.faults.pass_by("forward")
        second.step()


class WritesToBatch(Failing):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(2)
        return self.loss(batch[0])


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (StepsTooSoon, "an optimizer had begun to change parameters or its state"),
        (WritesToBatch, r"a tensor of shape \(4, 8\), of the batch or of a buffer, was changed in place"),
    ],
)
def test_what_cannot_be_undone_is_not_run_again(model: Any, reason: str) -> None:
    with pytest.raises(TrainingOutOfMemoryError, match=f"cannot run again, since {reason}"):
        run(model, OutOfMemoryRecovery(), Arm(Faults(), 2, "forward"))


class Broken(Failing):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("something else")


def test_other_errors_come_through_as_they_are_and_everything_is_given_back() -> None:
    trainer = make_trainer(OutOfMemoryRecovery(), plugins=[plugin := calm_plugin()])
    module = Broken(Faults())
    with pytest.raises(ValueError, match="something else"):
        trainer.fit(module)
    assert "backward" not in vars(plugin)
    assert "run" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)
    assert all("forward" not in vars(each) for each in module.modules())


class Activation(torch.Tensor):
    """Can be referred to weakly, as a plain tensor cannot be without being kept by PyTorch."""


class Holds(Failing):
    """Notes how many of its tensors are alive when a step begins."""

    alive: ClassVar[list[int]] = []
    tensors: ClassVar[WeakSet[Activation]] = WeakSet()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.alive.append(len(self.tensors))
        kept = torch.zeros(10).as_subclass(Activation)
        self.tensors.add(kept)
        loss = self.loss(batch[0])
        return loss + kept.sum().as_subclass(torch.Tensor)


def test_the_failed_attempt_is_freed_before_the_next_one_begins() -> None:
    faults = Faults()
    module = Holds(faults)
    trainer = make_trainer(OutOfMemoryRecovery(), Arm(faults, 1, "forward"), plugins=[calm_plugin()], max_steps=2)
    trainer.fit(module)
    assert Holds.alive == [0, 0, 0]


def test_a_trace_goes_on_and_says_what_happened(tmp_path: Path) -> None:
    faults = Faults()
    trainer = make_trainer(
        StepTrace(tmp_path / "trace", console=False),
        OutOfMemoryRecovery(),
        Arm(faults, 3, "backward"),
        plugins=[calm_plugin()],
        logger=CSVLogger(tmp_path),
        max_steps=8,
    )
    trainer.fit(Failing(faults))
    (trace,) = read_traces(tmp_path / "trace")
    assert [record["step"] for record in trace.steps] == list(range(1, 9))
    assert_closed(trace)
    (event,) = [event for event in trace.events if event["name"] == "out_of_memory_recovery"]
    assert event["details"]["step"] == 3
    assert event["details"]["ways"] == ["blocks.0 went to low precision"]
