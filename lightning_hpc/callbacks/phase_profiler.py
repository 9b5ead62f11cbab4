"""Feeds a timeline from the actions that Lightning announces to its profiler.

Which action belongs to which phase was read from the loops of Lightning 2.6.6. One iteration announces, in order::

    [_TrainingEpochLoop].train_dataloader_next         data_prep; from its end to the end of the next one: h2d
    [Strategy]X.batch_to_device                        h2d
    [Callback]…, [LightningModule]…, [Strategy]….on_…  schedule, as all hooks without an own phase
    run_training_batch
        [LightningModule]X.optimizer_step              optimizer, without what its closure runs:
            [Strategy]X.training_step                    forward
            [LightningModule]X.optimizer_zero_grad       optimizer
            [Strategy]X.backward                         backward
            [LightningModule]X.configure_gradient_clipping   optimizer
    [LightningModule]X.lr_scheduler_step               schedule
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from lightning_hpc.trace.timeline import Phase, Timeline

_NO_PHASE = -1
# Lightning has some hundred names. A user's may hold a counter, and must not fill the memory.
_MOST_ACTIONS = 1000
_PHASES = {
    ("Strategy", "training_step"): Phase.FORWARD,
    ("Strategy", "backward"): Phase.BACKWARD,
    ("LightningModule", "optimizer_step"): Phase.OPTIMIZER,
    ("LightningModule", "optimizer_zero_grad"): Phase.OPTIMIZER,
    ("LightningModule", "configure_gradient_clipping"): Phase.OPTIMIZER,
}
_OWNERS_OF_HOOKS = ("Callback", "LightningModule", "Strategy")
# Lightning runs them on the way to the device.
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def _do_nothing() -> None:
    pass


class _Action:
    """A context for all uses of an action, also nested ones: what is open is the timeline's business."""

    __slots__ = ("_start", "_stop", "name", "phase")

    def __init__(self, name: str, start: Callable[[], None], stop: Callable[[], None], phase: int = _NO_PHASE) -> None:
        self.name = name
        self._start = start
        self._stop = stop
        self.phase = phase

    def __enter__(self) -> str:
        self._start()
        return self.name

    def __exit__(self, *exception: object) -> None:
        self._stop()


# Shared by all actions whose phase is being charged already. Only Lightning's have a phase, and it reads no name.
_NO_CHANGE = nullcontext()


class PhaseProfiler:
    """Stands in for the user's profiler, forwards everything to it, and tells a timeline what happens.

    It passes for the user's profiler in ``isinstance``, and all other attributes are the user's. It does not inherit
    from `Profiler`, whose attributes would hide those of the user's.

    Args:
        profiler: The user's profiler.
        timeline: Is told what happens.
        trainer: Is asked for the current epoch.
        silent_prefix: Actions that start with this are no phase of their own: the hooks of the callback that times the
            manual backward by pushing and popping in them.

    Attributes:
        profile: Returns a context for the action of a name. Costs next to nothing for those that change no phase.
    """

    def __init__(self, profiler: Profiler, timeline: Timeline, trainer: pl.Trainer, silent_prefix: str) -> None:
        self._profiler = profiler
        self._timeline = timeline
        self._silent_prefix = silent_prefix
        # A subclass may do something.
        self._forwards = type(profiler) is not PassThroughProfiler
        self._actions = {
            action.name: action
            for action in (
                _Action("run_training_epoch", lambda: timeline.enter_epoch(trainer.current_epoch), timeline.exit_epoch),
                _Action("run_training_batch", timeline.start_batch, _do_nothing),
                self._phase_action("optimizer_step", Phase.OPTIMIZER),  # manual optimization
                _Action("save_checkpoint", lambda: timeline.start_span("checkpoint"), timeline.stop_span),
            )
        }
        self.profile = self._profile_both if self._forwards else self._make_profile()

    @property  # type: ignore[misc]  # read-only, where that of `object` can be written
    def __class__(self) -> type[Any]:
        return type(self._profiler)

    def __getattr__(self, name: str) -> Any:
        # Not `self._profiler`, which ends in a recursion where a copy has no attributes yet.
        return getattr(object.__getattribute__(self, "_profiler"), name)

    def start(self, action_name: str) -> None:
        """Starts an action."""
        if self._forwards:
            self._profiler.start(action_name)
        self._find(action_name).__enter__()

    def stop(self, action_name: str) -> None:
        """Stops an action."""
        self._find(action_name).__exit__()
        if self._forwards:
            self._profiler.stop(action_name)

    def _make_profile(self) -> Callable[[str], AbstractContextManager[Any]]:
        """`profile` for a user's profiler that does nothing.

        Lightning calls it some 40 times a step, and a class with `__getattr__` is slow to look up its own attributes.
        """
        actions, find, timeline = self._actions, self._find, self._timeline

        def profile(action_name: str) -> AbstractContextManager[Any]:
            action = actions.get(action_name) or find(action_name)
            return _NO_CHANGE if action.phase == timeline.phase else action

        return profile

    @contextmanager
    def _profile_both(self, action_name: str) -> Generator[str, None, None]:
        with self._profiler.profile(action_name), self._find(action_name):
            yield action_name

    def _find(self, action_name: str) -> _Action:
        action = self._actions.get(action_name)
        if action is not None:
            return action
        action = self._make_action(action_name)
        if len(self._actions) < _MOST_ACTIONS:
            self._actions[action_name] = action
        return action

    def _make_action(self, name: str) -> _Action:
        timeline = self._timeline
        owner, _, method = name.partition("]")
        owner, hook = owner.removeprefix("["), method.rpartition(".")[2]
        if hook == "train_dataloader_next":
            return _Action(name, timeline.start_fetch, timeline.stop_fetch)
        if (owner, hook) == ("Strategy", "batch_to_device"):
            return _Action(name, timeline.start_transfer, timeline.stop_transfer)
        # The outermost actions of a validation that are always announced, and one that may come before.
        if owner == "LightningModule" and hook in ("on_validation_model_zero_grad", "on_validation_model_eval"):
            return _Action(name, timeline.start_validation, _do_nothing)
        if (owner, hook) == ("Strategy", "on_validation_end"):
            return _Action(name, _do_nothing, timeline.stop_validation)
        if owner not in _OWNERS_OF_HOOKS or hook in _TRANSFER_HOOKS or name.startswith(self._silent_prefix):
            return _Action(name, _do_nothing, _do_nothing)
        return self._phase_action(name, _PHASES.get((owner, hook), Phase.SCHEDULE))

    def _phase_action(self, name: str, phase: Phase) -> _Action:
        return _Action(name, partial(self._timeline.push, int(phase)), self._timeline.pop, int(phase))
