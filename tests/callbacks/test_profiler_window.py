import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.profiler import ProfilerActivity, profile

from lightning_hpc.callbacks import ProfilerWindow, StepTrace
from lightning_hpc.trace import read_traces
from lightning_hpc.trace.outlier_watch import OutlierWatch
from tests.callbacks.models import Automatic, Manual, make_loader
from tests.callbacks.test_step_trace import make_trainer


def fit(window: ProfilerWindow, *callbacks: pl.Callback, batches: int = 8, **kwargs: Any) -> list[str]:
    """Names of the files, in order."""
    make_trainer(window, *callbacks, **kwargs).fit(Automatic(), make_loader(batches))
    return [path.name for path in window.paths]


def names_in(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


def name(step: int) -> str:
    return f"profile_rank_00000_step_{step:06d}.json.gz"


@pytest.fixture
def slow_batches(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Which calls of the watch find an outlier, counted from 1."""
    found: set[int] = set()
    calls = iter(range(1, 10**6))
    monkeypatch.setattr(OutlierWatch, "add", lambda watch, duration_ns: next(calls) in found)
    return found


@pytest.fixture(autouse=True)
def no_profiler_is_left_behind() -> Iterator[None]:
    yield
    assert not torch.autograd._profiler_enabled()


def test_named_steps_are_profiled_from_the_first_one_on(tmp_path: Path) -> None:
    window = ProfilerWindow(steps=[4, 1], length=2, dirpath=tmp_path)
    assert fit(window) == [name(1), name(4)]
    for path in window.paths:
        assert path.parent == tmp_path
        # Two training steps, no more.
        assert names_in(path).count("aten::square") == 2


@pytest.mark.filterwarnings("ignore:ProfilerWindow. the fit ended")
def test_steps_within_a_window_open_no_other_and_the_end_of_the_fit_closes_it(tmp_path: Path) -> None:
    window = ProfilerWindow(steps=[2, 3, 4, 7, 100], length=2, dirpath=tmp_path)
    assert fit(window) == [name(2), name(4), name(7)]
    assert fit(window, batches=7) == [name(2), name(4), name(7)]
    assert names_in(window.paths[-1]).count("aten::square") == 1
    assert fit(ProfilerWindow(steps=[2, 3], length=2, dirpath=tmp_path)) == [name(2)]


def test_steps_are_those_of_the_optimizer(tmp_path: Path) -> None:
    window = ProfilerWindow(steps=[2], length=1, dirpath=tmp_path)
    assert fit(window, accumulate_grad_batches=3) == [name(2)]
    assert names_in(window.paths[0]).count("aten::square") == 3


def test_a_number_that_a_batch_passes_by_opens_the_window_there(tmp_path: Path) -> None:
    class TwoSteps(Manual):
        def train_on(self, batch: torch.Tensor, batch_idx: int) -> None:
            super().train_on(batch, batch_idx)
            super().train_on(batch, batch_idx)

    window = ProfilerWindow(steps=[4], length=1, dirpath=tmp_path)
    make_trainer(window).fit(TwoSteps(), make_loader(5))
    assert [path.name for path in window.paths] == [name(5)]


def test_steps_before_the_start_of_a_resumed_fit_are_over(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.fit(Automatic(), make_loader(4))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    window = ProfilerWindow(steps=[2, 6], length=1, dirpath=tmp_path)
    trainer = make_trainer(window, max_epochs=2)
    trainer.fit(Automatic(), make_loader(4), ckpt_path=tmp_path / "last.ckpt")
    assert [path.name for path in window.paths] == [name(6)]


def test_an_outlier_opens_a_window_over_the_steps_that_follow(tmp_path: Path, slow_batches: set[int]) -> None:
    slow_batches |= {2}
    window = ProfilerWindow(outliers=True, length=2, dirpath=tmp_path)
    # The first call of the watch is at the second batch.
    assert fit(window) == [name(4)]
    assert names_in(window.paths[0]).count("aten::square") == 2


def test_no_more_windows_than_the_limit_in_a_fit(tmp_path: Path, slow_batches: set[int]) -> None:
    slow_batches |= set(range(1, 100))
    window = ProfilerWindow(outliers=True, length=1, limit=2, dirpath=tmp_path)
    assert fit(window, batches=20) == [name(3), name(6)]
    assert len(fit(window, batches=20)) == 2


def test_batches_behind_a_validation_a_checkpoint_or_a_new_epoch_are_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[int] = []
    monkeypatch.setattr(OutlierWatch, "add", lambda watch, duration_ns: judged.append(duration_ns))
    window = ProfilerWindow(outliers=True, dirpath=tmp_path)
    fit(window, max_epochs=2)
    assert len(judged) == 2 * 7
    judged.clear()
    fit(window, ModelCheckpoint(tmp_path, every_n_train_steps=4), enable_checkpointing=True)
    assert len(judged) == 7 - 1
    judged.clear()
    trainer = make_trainer(window, val_check_interval=4, num_sanity_val_steps=0)
    trainer.fit(Automatic(), make_loader(8), make_loader(1))
    assert len(judged) == 7 - 1


def test_a_profiler_that_is_running_is_left_alone(tmp_path: Path) -> None:
    window = ProfilerWindow(steps=[2], dirpath=tmp_path)
    with (
        pytest.warns(RuntimeWarning, match=r"leaves out the window at step 2 .*: another profiler is running"),
        profile(activities=[ProfilerActivity.CPU]) as other,
    ):
        assert fit(window) == []
    assert sum(event.name == "aten::square" for event in other.events()) == 8


def test_a_profiler_that_takes_the_events_of_a_window_is_survived(tmp_path: Path) -> None:
    class Thief(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                with profile(activities=[ProfilerActivity.CPU]):
                    pass

    with pytest.warns(RuntimeWarning, match="has lost the window at step 2: another profiler was started in it"):
        assert fit(ProfilerWindow(steps=[2], dirpath=tmp_path), Thief()) == []


def test_an_exception_in_a_window_keeps_what_was_profiled(tmp_path: Path) -> None:
    batches = []

    def fail_at_third(place: str) -> None:
        if place == "forward":
            batches.append(place)
            if len(batches) == 3:
                raise KeyError("planted")

    window = ProfilerWindow(steps=[2], dirpath=tmp_path)
    with pytest.raises(KeyError, match="planted"):
        make_trainer(window).fit(Automatic(fail_at_third), make_loader(8))
    assert [path.name for path in window.paths] == [name(2)]
    assert names_in(window.paths[0]).count("aten::square") == 1
    assert fit(window) == [name(2)]


def test_a_file_that_cannot_be_written_does_not_end_the_fit(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    window = ProfilerWindow(steps=[2], dirpath=tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="has lost the window at step 2: .*file"):
        assert fit(window) == []


def test_by_default_the_files_lie_beside_those_of_step_trace_which_gets_an_event(tmp_path: Path) -> None:
    window = ProfilerWindow(steps=[2])
    assert fit(window, StepTrace(console=False), default_root_dir=tmp_path) == [name(2)]
    assert window.paths[0].parent == tmp_path / "step_trace"
    (trace,) = read_traces(tmp_path / "step_trace")
    assert [(event["name"], event["details"]) for event in trace.events] == [
        ("profile", {"file": name(2), "first_step": 2, "reason": "step 2 was named"})
    ]
    window = ProfilerWindow(steps=[2])
    fit(window, StepTrace(tmp_path / "own", console=False), default_root_dir=tmp_path)
    assert window.paths[0].parent == tmp_path / "own"


def test_hooks_that_do_nothing_are_not_called_unless_a_subclass_has_them() -> None:
    class Own(ProfilerWindow):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            """Something."""

    assert not callable(ProfilerWindow(steps=[1]).on_before_backward)
    assert callable(Own(steps=[1]).on_before_backward)


def test_the_hook_of_a_batch_is_not_called_while_there_is_nothing_to_do(tmp_path: Path) -> None:
    called: list[int] = []

    class Counting(ProfilerWindow):
        def _finish_batch(self, trainer: pl.Trainer, *args: Any) -> None:
            called.append(trainer.global_step)
            super()._finish_batch(trainer, *args)

    assert fit(Counting(steps=[5, 12], length=2, dirpath=tmp_path), batches=20) == [name(5), name(12)]
    # The ends of the steps before a window and of those in it.
    assert called == [4, 5, 6, 11, 12, 13]


def test_a_subclass_may_call_the_hook_of_its_base(tmp_path: Path) -> None:
    class Own(ProfilerWindow):
        def on_train_batch_end(self, *args: Any) -> None:
            hook = super().on_train_batch_end
            assert hook is not None
            hook(*args)

    assert fit(Own(steps=[5], length=1, dirpath=tmp_path)) == [name(5)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "there is nothing to profile"),
        ({"steps": [3, 0]}, "steps has 0"),
        ({"steps": [3], "length": 0}, "length has 0"),
        ({"outliers": True, "limit": 0}, "limit has 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProfilerWindow(**arguments)


def test_a_remote_directory_is_refused() -> None:
    with pytest.raises(ValueError, match="'s3://bucket' is not a local directory"):
        fit(ProfilerWindow(steps=[1], dirpath="s3://bucket"))
