import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hpc.callbacks import ActivationCheckpointing, activation_checkpointing
from lightning_hpc.memory import CallableProbe, MemoryReading, SavedActivations
from tests.callbacks.fake_step_trace import FakeStepTrace
from tests.callbacks.test_step_trace import make_trainer
from tests.memory.block_models import WIDTH, InPlace, Residual, equal

BATCHES = 6


class Stacked(pl.LightningModule):
    """Residual blocks with dropout, and what each step saved and started with."""

    def __init__(self, width: int = 4 * WIDTH, *, manual: bool = False, lr: float = 0.05) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Residual(width, dropout=0.3) for _ in range(4))
        self.lr = lr
        self.losses: list[Tensor] = []
        self.recomputed: list[list[str]] = []
        self.forwards = 0
        self.blocks[0].norm.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: Any) -> Tensor:
        loss = (self(batch[0]) - 1).square().mean()
        self.losses.append(loss.detach())
        self.recomputed.append([name for name, block in self.blocks.named_children() if is_checkpointed(block)])
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def is_checkpointed(block: nn.Module) -> bool:
    return "forward" in block.__dict__ and block.forward.__func__.is_on  # type: ignore[union-attr]


def loader(batches: int = BATCHES) -> DataLoader[Any]:
    x = torch.randn(4 * batches, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=4, shuffle=True)


def fit(*callbacks: pl.Callback, model: Stacked | None = None, manual: bool = False, **kwargs: Any) -> Stacked:
    pl.seed_everything(3, verbose=False)
    model = model or Stacked(manual=manual)
    make_trainer(*callbacks, **kwargs).fit(model, loader(), loader(2))
    return model


@pytest.mark.parametrize(
    ("manual", "kwargs"),
    [
        (False, {"max_epochs": 2}),
        (False, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (False, {"precision": "bf16-mixed", "val_check_interval": 2}),
        (True, {"max_epochs": 2}),
    ],
)
def test_training_is_bitwise_that_without(manual: bool, kwargs: dict[str, Any]) -> None:
    plain = fit(manual=manual, **kwargs)
    after = torch.get_rng_state()
    checkpointing = ActivationCheckpointing(budget=0.5)
    other = fit(checkpointing, manual=manual, **kwargs)
    assert equal(torch.get_rng_state(), after)
    assert equal((plain.losses, plain.state_dict()), (other.losses, other.state_dict()))
    assert checkpointing.plan is not None
    assert checkpointing.plan.fits
    assert 0 < len(checkpointing.plan.blocks) < 4


def test_all_blocks_until_the_batch_after_the_first_step_and_then_the_chosen_ones() -> None:
    checkpointing = ActivationCheckpointing(budget=0.5)
    model = fit(checkpointing, accumulate_grad_batches=2)
    assert checkpointing.plan is not None
    chosen = [name.removeprefix("blocks.") for name in checkpointing.plan.blocks]
    assert model.recomputed == [["0", "1", "2", "3"]] * 3 + [chosen] * 3
    assert not any("forward" in block.__dict__ for block in model.blocks)


def test_the_peak_of_later_steps_is_the_planned_one_and_within_the_budget() -> None:
    class Measure(pl.Callback):
        peaks: list[int]

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            alive = [*pl_module.parameters(), *batch]
            self.saved = SavedActivations(alive).__enter__()
            # What recomputations save is seen only by those who are told.
            self.watching = checkpointing._blocks.watched_by(self.saved)
            self.watching.__enter__()

        def on_train_batch_end(self, *_: Any) -> None:
            self.watching.__exit__(None, None, None)
            self.saved.__exit__(None, None, None)
            self.peaks.append(self.saved.peak_bytes)

    class AfterPlan(Measure):
        def on_train_batch_start(self, *args: Any) -> None:
            if checkpointing.plan is not None:
                super().on_train_batch_start(*args)

        def on_train_batch_end(self, *args: Any) -> None:
            if hasattr(self, "saved"):
                super().on_train_batch_end()

    checkpointing, measure = ActivationCheckpointing(budget=0.4), AfterPlan()
    measure.peaks = []
    fit(measure, checkpointing)
    assert checkpointing.plan is not None
    assert measure.peaks == [checkpointing.plan.peak_bytes] * (BATCHES - 2)
    assert checkpointing.plan.peak_bytes <= checkpointing.plan.budget_bytes
    assert checkpointing.plan.budget_bytes == int(0.4 * checkpointing.plan.plain_peak_bytes)


def test_checkpoint_files_are_those_without(tmp_path: Path) -> None:
    contents = []
    for name, callbacks in (("plain", []), ("other", [ActivationCheckpointing(budget=0.5)])):
        checkpoint = ModelCheckpoint(tmp_path / name, every_n_train_steps=4, save_top_k=-1)
        fit(*callbacks, checkpoint, enable_checkpointing=True)
        (path,) = (tmp_path / name).glob("*.ckpt")
        contents.append(torch.load(path, weights_only=False))
    plain, other = contents
    assert plain.keys() == other.keys()
    assert equal([plain["state_dict"], plain["optimizer_states"]], [other["state_dict"], other["optimizer_states"]])
    assert not [key for key in other["callbacks"] if "ActivationCheckpointing" in key]


def test_one_line_and_one_event_say_what_was_chosen(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_checkpointing, "StepTrace", FakeStepTrace)
    step_trace = FakeStepTrace()
    with caplog.at_level(logging.INFO):
        fit(ActivationCheckpointing(budget=0.5), step_trace)
    (line,) = [record.message for record in caplog.records if "ActivationCheckpointing" in record.message]
    assert "of 4 blocks are recomputed (blocks." in line
    assert " ms more a step" in line
    ((name, details),) = step_trace.events
    assert name == "activation_checkpointing"
    assert details["peak_bytes"] <= details["budget_bytes"] < details["plain_peak_bytes"]


def test_where_all_fits_nothing_is_recomputed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = fit(ActivationCheckpointing(budget=10**9))
    assert model.recomputed[2:] == [[]] * (BATCHES - 2)
    assert any("no block is recomputed" in record.message for record in caplog.records)


def test_a_budget_that_cannot_be_met_gets_the_least_and_a_warning_with_advice() -> None:
    checkpointing = ActivationCheckpointing(budget=100)
    with pytest.warns(UserWarning, match=r"cannot get below .* In this order, try: smaller blocks"):
        fit(checkpointing)
    assert checkpointing.plan is not None
    assert not checkpointing.plan.fits
    assert checkpointing.plan.peak_bytes < checkpointing.plan.plain_peak_bytes / 2


@pytest.mark.parametrize(("spare", "recomputes"), [(100, True), (10**9, False)])
def test_auto_leaves_to_activations_what_others_do_not_use(
    monkeypatch: pytest.MonkeyPatch, spare: int, recomputes: bool
) -> None:
    used = 10**8
    probe = CallableProbe(lambda: MemoryReading(used, round(used / 0.9) + spare))
    monkeypatch.setattr(activation_checkpointing, "default_probe", lambda device: probe)
    checkpointing = ActivationCheckpointing()
    fit(checkpointing)
    plan = checkpointing.plan
    assert plan is not None
    assert plan.fits
    assert bool(plan.blocks) == recomputes
    # With nothing to spare, activations may take what they took while all blocks were checkpointed.
    assert (plan.budget_bytes < plan.plain_peak_bytes) == recomputes


def test_blocks_can_be_named_and_others_are_left_alone() -> None:
    model = fit(ActivationCheckpointing(budget=0.9, blocks=["blocks.1"]))
    assert model.recomputed[-1] == ["1"]


def test_a_block_that_cannot_be_recomputed_is_left_out_with_a_warning() -> None:
    def make() -> Stacked:
        pl.seed_everything(1, verbose=False)
        model = Stacked()
        model.blocks[2] = InPlace()
        return model

    plain = fit(model=make())
    checkpointing = ActivationCheckpointing(budget=0.5, blocks=["Residual", "InPlace"])
    with pytest.warns(UserWarning, match=r"leaves blocks\.2 as it is: it changes its input in place"):
        other = fit(checkpointing, model=make())
    assert equal((plain.losses, plain.state_dict()), (other.losses, other.state_dict()))


def test_a_model_without_blocks_is_told_how_to_name_some() -> None:
    model = Stacked()
    model.blocks = nn.ModuleList([Residual()])
    with pytest.warns(UserWarning, match="found no blocks to checkpoint; name some"):
        fit(ActivationCheckpointing(budget=0.5), model=model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_left_alone_with_a_warning() -> None:
    model = Stacked()
    with pytest.warns(UserWarning, match="leaves the model as it is: it is compiled"):
        make_trainer(ActivationCheckpointing(budget=0.5)).fit(torch.compile(model, backend="eager"), loader())
    assert model.recomputed[-1] == []


def test_an_error_in_the_measured_batch_leaves_nothing_behind() -> None:
    class Failing(Stacked):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            if len(self.losses) == 2:
                raise ArithmeticError
            return loss

    model = Failing()
    with pytest.raises(ArithmeticError):
        fit(ActivationCheckpointing(budget=0.5), model=model)
    assert not any("forward" in block.__dict__ for block in model.blocks)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")
def test_a_batch_without_backward_is_measured_again_and_a_skipped_one_too() -> None:
    class Skipping(Stacked):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == BATCHES - 1 else None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if 1 <= batch_idx < BATCHES - 1 and self.current_epoch == 0 else loss

    checkpointing = ActivationCheckpointing(budget=0.5)
    model = fit(checkpointing, model=Skipping(), max_epochs=2)
    assert model.recomputed[: BATCHES - 1] == [["0", "1", "2", "3"]] * (BATCHES - 1)
    assert checkpointing.plan is not None
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_it_can_be_asked_to_measure_again() -> None:
    class Ask(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                checkpointing.measure_again()

    checkpointing = ActivationCheckpointing(budget=0.5)
    model = fit(checkpointing, Ask())
    every = ["0", "1", "2", "3"]
    chosen = model.recomputed[2]
    assert len(chosen) < 4
    assert [len(names) for names in model.recomputed] == [4, 4, len(chosen), len(chosen), 4, len(chosen)]
    assert model.recomputed[1] == model.recomputed[4] == every


def test_another_fit_measures_again() -> None:
    checkpointing = ActivationCheckpointing(budget=0.5)
    plans = []
    for width in (2 * WIDTH, 16 * WIDTH):
        fit(checkpointing, model=Stacked(width))
        plans.append(checkpointing.plan)
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].plain_peak_bytes < plans[1].plain_peak_bytes


@pytest.mark.parametrize("budget", [0, -5, 0.0, 1.0, 1.5, True, "half", None])
def test_a_budget_that_is_none_is_told_what_is_one(budget: Any) -> None:
    with pytest.raises(ValueError, match=rf"budget={budget!r} is none; give a number of bytes"):
        ActivationCheckpointing(budget)


@pytest.fixture(autouse=True)
def no_hooks_left() -> Iterator[None]:
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
