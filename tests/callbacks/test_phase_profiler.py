from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, SimpleProfiler

from lightning_hpc.callbacks.phase_profiler import _MOST_ACTIONS, PhaseProfiler
from lightning_hpc.trace.timeline import Phase, Timeline

SILENT = "[Callback]StepTrace."


class Wrapped:
    """A profiler around another, in the middle of an iteration."""

    def __init__(self, user: Profiler) -> None:
        self.timeline = Timeline(lambda: 0, lambda charged, start, total: None, lambda span: None)
        self.profiler = PhaseProfiler(user, self.timeline, SimpleNamespace(current_epoch=3), SILENT)

    def phase_in(self, name: str) -> str:
        with self.profiler.profile(name):
            return Phase(self.timeline.phase).name.lower()


@pytest.fixture(params=[PassThroughProfiler, SimpleProfiler])
def wrapped(request: pytest.FixtureRequest) -> Wrapped:
    return Wrapped(request.param())


PHASES = {
    "[_TrainingEpochLoop].train_dataloader_next": "data_prep",
    "[Strategy]HPCStrategy.batch_to_device": "h2d",
    "[Strategy]HPCStrategy.training_step": "forward",
    "[Strategy]HPCStrategy.backward": "backward",
    "[LightningModule]My.optimizer_step": "optimizer",
    "[LightningModule]My.optimizer_zero_grad": "optimizer",
    "[LightningModule]My.configure_gradient_clipping": "optimizer",
    "optimizer_step": "optimizer",
    "[LightningModule]My.lr_scheduler_step": "schedule",
    "[LightningModule]My.on_train_batch_start": "schedule",
    "[Strategy]HPCStrategy.on_train_batch_start": "schedule",
    "[Callback]ModelCheckpoint{'monitor': 'a.b]', 'mode': 'min'}.on_train_batch_end": "schedule",
}


@pytest.mark.parametrize("name", PHASES)
def test_actions_have_their_phase(wrapped: Wrapped, name: str) -> None:
    assert wrapped.phase_in(name) == PHASES[name]
    wrapped.timeline.push(int(Phase.BACKWARD))
    assert wrapped.phase_in(name) == PHASES[name]
    assert wrapped.timeline.phase == Phase.BACKWARD


@pytest.mark.parametrize(
    "name",
    [
        "my part of training_step",
        "[mine].part",
        "[_EvaluationLoop].val_next",
        "save_checkpoint",
        "[LightningModule]My.on_after_batch_transfer",
        "[LightningDataModule]My.on_before_batch_transfer",
        f"{SILENT}on_before_backward",
    ],
)
def test_other_actions_inherit(wrapped: Wrapped, name: str) -> None:
    for phase in (Phase.FORWARD, Phase.SCHEDULE):
        wrapped.timeline.push(int(phase))
        assert wrapped.phase_in(name) == phase.name.lower()


def test_the_context_gives_the_name_of_a_users_action(wrapped: Wrapped) -> None:
    with wrapped.profiler.profile("mine") as name:
        assert name == "mine"


def test_an_exception_ends_its_phases(wrapped: Wrapped) -> None:
    profile = wrapped.profiler.profile
    with pytest.raises(RuntimeError), profile("[Strategy]S.training_step"), profile("[Strategy]S.backward"):
        raise RuntimeError
    assert wrapped.timeline.phase == Phase.SCHEDULE


def test_start_and_stop_are_forwarded() -> None:
    user = SimpleProfiler()
    wrapped = Wrapped(user)
    wrapped.profiler.start("optimizer_step")
    assert "optimizer_step" in user.current_actions
    assert wrapped.timeline.phase == Phase.OPTIMIZER
    wrapped.profiler.stop("optimizer_step")
    assert list(user.recorded_durations) == ["optimizer_step"]
    assert wrapped.timeline.phase == Phase.SCHEDULE


def test_a_profiler_with_its_own_context_is_asked_for_it() -> None:
    names = []

    class Own(PassThroughProfiler):
        @contextmanager
        def profile(self, action_name: str) -> Generator[str, None, None]:
            names.append(action_name)
            yield action_name

    assert Wrapped(Own()).phase_in("[Strategy]S.training_step") == "forward"
    assert names == ["[Strategy]S.training_step"]


def test_it_passes_for_the_users_profiler() -> None:
    user = SimpleProfiler(filename="report", extended=False)
    profiler = Wrapped(user).profiler
    assert isinstance(profiler, SimpleProfiler)
    assert not isinstance(profiler, PassThroughProfiler)
    assert profiler.filename == "report"
    assert profiler.recorded_durations is user.recorded_durations
    user.start("mine")
    user.stop("mine")
    assert profiler.summary() == user.summary()
    with pytest.raises(AttributeError, match="nothing_like_that"):
        profiler.nothing_like_that  # noqa: B018


def test_the_users_profiler_is_not_called_where_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    user = PassThroughProfiler()
    monkeypatch.setattr(user, "start", None)
    monkeypatch.setattr(user, "profile", None)
    assert Wrapped(user).phase_in("[Strategy]S.training_step") == "forward"


def test_names_that_count_do_not_fill_the_memory() -> None:
    profiler = Wrapped(PassThroughProfiler()).profiler
    for step in range(3 * _MOST_ACTIONS):
        with profiler.profile(f"step {step}"):
            pass
    assert len(profiler._actions) == _MOST_ACTIONS
