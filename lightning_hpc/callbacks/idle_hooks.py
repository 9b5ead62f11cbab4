"""Hooks that a callback has nothing to do in: Lightning calls every hook of every callback, at some 3 µs each."""

from collections.abc import Iterable

from lightning.pytorch.callbacks import Callback

_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def skip_idle_hooks(callback: Callback, base: type[Callback], used: Iterable[str]) -> None:
    """Has Lightning skip the hooks of a training step, except those in ``used``.

    Args:
        callback: The callback.
        base: The class that knows what it uses; hooks that a subclass of it overrides are called.
        used: Names of hooks.
    """
    for hook in _STEP_HOOKS:
        if hook not in used and getattr(type(callback), hook) is getattr(base, hook):
            callback.__dict__[hook] = None  # Lightning skips what is not callable


def call_all_hooks(callback: Callback) -> None:
    """Takes that back."""
    for hook in _STEP_HOOKS:
        callback.__dict__.pop(hook, None)
