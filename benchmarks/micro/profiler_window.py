"""What `ProfilerWindow` costs in a step while no window is open: ``python benchmarks/micro/profiler_window.py``.

Lightning calls its hooks of one batch for a Trainer with nothing, with an empty callback, and with each kind of window,
in turns. A whole fit varies by more from one run to the next than what is to be seen here.
"""

import logging
import statistics
import time
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.call import _call_callback_hooks

from lightning_hpc.callbacks import ProfilerWindow
from lightning_hpc.trace.outlier_watch import OutlierWatch

# With the number of their arguments beside Trainer and module.
_HOOKS = {
    "on_train_batch_start": 2,
    "on_before_zero_grad": 1,
    "on_before_backward": 1,
    "on_after_backward": 0,
    "on_before_optimizer_step": 1,
    "on_train_batch_end": 3,
}
_STEPS = 2000
_ROUNDS = 30


class _NeverAnOutlier(OutlierWatch):
    def add(self, duration_ns: int) -> bool:
        super().add(duration_ns)
        return False


def _time_step(trainer: pl.Trainer, callbacks: list[Callback]) -> float:
    """Microseconds of a batch's hooks."""
    trainer.callbacks = callbacks  # type: ignore[attr-defined]
    start = time.perf_counter()
    for _ in range(_STEPS):
        for hook, count in _HOOKS.items():
            _call_callback_hooks(trainer, hook, *[None] * count)
    return (time.perf_counter() - start) / _STEPS * 1e6


def main() -> None:
    """Prints the medians of the rounds, with their quartiles."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False)
    trainer.fit(BoringModel())
    windows = {"named": ProfilerWindow(steps=[10**9]), "outliers": ProfilerWindow(outliers=True)}
    for window in windows.values():
        window.on_train_start(trainer, trainer.lightning_module)
    windows["outliers"]._watch = _NeverAnOutlier()
    cases: dict[str, list[Callback]] = {"nothing": [], "empty callback": [Callback()]}
    cases |= {name: [window] for name, window in windows.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(_ROUNDS):
        for name, callbacks in cases.items():
            times[name].append(_time_step(trainer, callbacks))
    for name in cases:
        more = [mine - nothing for mine, nothing in zip(times[name], times["nothing"], strict=True)]
        low, median, high = statistics.quantiles(more)
        print(f"{name:15} {median:+6.2f} µs a step ({low:+.2f} to {high:+.2f})")


if __name__ == "__main__":
    main()
