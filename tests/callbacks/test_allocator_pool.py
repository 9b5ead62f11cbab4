import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hpc.callbacks import AllocatorPool, StepTrace, allocator_pool
from tests.callbacks.models import Automatic, make_loader
from tests.callbacks.test_step_trace import make_trainer

GIB = 2**30


class FakePool:
    """A device with four GiB; what was in use before the first step does not count."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"
        self.peaks = [1 * GIB, 3 * GIB]

    def peak_bytes(self) -> int:
        return self.peaks.pop(0)

    def reserve(self, size: int) -> int:
        if size > 4 * GIB:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return size


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the callback asks of a Trainer on a CUDA device."""
    monkeypatch.setattr(allocator_pool, "CudaPool", FakePool)
    monkeypatch.setattr(allocator_pool, "why_not_in_one_piece", lambda: None)
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    return SimpleNamespace(strategy=strategy, global_step=5, global_rank=1, callbacks=[StepTrace()])


def train(callback: Any, trainer: Any, steps: int) -> None:
    callback.on_train_start(trainer, None)
    for _ in range(steps):
        trainer.global_step += 1
        if callback.on_train_batch_end is not None:
            callback.on_train_batch_end(trainer, None, None, None, 0)


def test_the_pool_gets_the_peak_of_the_first_steps_and_some_more(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    monkeypatch.setattr(StepTrace, "write_event", lambda self, *event: events.append(event))
    callback = AllocatorPool(warm_up_steps=3, headroom=0.25)
    train(callback, trainer, steps=2)
    assert callback.reserved_bytes is None
    train(callback, trainer, steps=5)
    assert callback.reserved_bytes == int(3.75 * GIB)
    assert events == [("allocator_pool", {"peak_bytes": 3 * GIB, "reserved_bytes": int(3.75 * GIB)})]
    assert callback.on_train_batch_end is None  # nothing is left to do
    callback.teardown(trainer, Automatic(), "fit")
    assert callback.on_train_batch_end is not None


def test_a_device_that_is_too_full_is_a_warning_at_the_start(trainer: Any) -> None:
    callback = AllocatorPool(headroom=0.5)
    with pytest.warns(
        RuntimeWarning, match=r"rank 1: the first steps took up to 3\.00 GiB, and .* 50% more in one piece"
    ):
        train(callback, trainer, steps=4)
    assert callback.reserved_bytes is None


def test_what_stands_against_it_is_said(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator_pool, "why_not_in_one_piece", lambda: "a reason")
    callback = AllocatorPool()
    with pytest.warns(UserWarning, match="AllocatorPool reserves nothing, since a reason"):
        train(callback, trainer, steps=4)
    assert callback.reserved_bytes is None


@pytest.mark.parametrize(
    ("asked", "reason", "switched", "warns"),
    [("auto", None, 1, False), ("auto", "a reason", 0, False), (True, "a reason", 0, True), (False, None, 0, False)],
)
def test_expandable_segments_are_switched_on_where_they_may(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, asked: Any, reason: str | None, switched: int, warns: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(allocator_pool, "use_expandable_segments", lambda: calls.append("on"))
    monkeypatch.setattr(allocator_pool, "why_not_expandable", lambda: reason)
    callback = AllocatorPool(expandable_segments=asked)
    callback.setup(trainer, Automatic(), "validate")
    assert not calls
    if warns:
        with pytest.warns(UserWarning, match="no expandable segments, since a reason"):
            callback.setup(trainer, Automatic(), "fit")
    else:
        callback.setup(trainer, Automatic(), "fit")
    assert len(calls) == switched


@pytest.mark.parametrize(
    "arguments", [{"warm_up_steps": 0}, {"headroom": -0.1}, {"headroom": float("nan")}, {"expandable_segments": "on"}]
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    (name, value), *_ = arguments.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        AllocatorPool(**arguments)


def test_elsewhere_it_does_nothing(tmp_path: Path) -> None:
    callback = AllocatorPool()
    trainer = make_trainer(callback, StepTrace(tmp_path, console=False))
    trainer.fit(Automatic(), make_loader(4))
    assert callback.reserved_bytes is None
    lines = (tmp_path / "attempt_000" / "rank_00000.jsonl").read_text().splitlines()
    assert not [line for line in lines if json.loads(line)["type"] == "event"]


class Wide(Automatic):
    """Batches of different sizes, the largest in the second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = [1000, 4000, 3000, 2500, 3700, 1500][batch_idx % 6]
        return super().training_step(batch, batch_idx) + torch.ones(rows, 1000, device=self.device).exp().mean() * 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("expandable", [False, "auto"])
def test_later_steps_ask_the_device_for_nothing(expandable: Any) -> None:
    callback = AllocatorPool(headroom=0.1, expandable_segments=expandable)
    trainer = make_trainer(callback, accelerator="cuda", devices=1)
    calls: list[int] = []

    class Count(Wide):
        def on_train_batch_end(self, *args: Any) -> None:
            calls.append(torch.cuda.memory_stats().get("num_device_alloc", 0))

    trainer.fit(Count(), make_loader(12))
    assert callback.reserved_bytes is not None
    assert callback.reserved_bytes <= torch.cuda.memory_reserved()
    assert calls[3] == calls[-1]
