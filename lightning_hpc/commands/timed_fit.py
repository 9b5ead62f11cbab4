"""One training of some steps, with what it took and what it sent."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from lightning_hpc.comm.stats import CommStats
from lightning_hpc.commands.observing_strategy import ObservingStrategy

WARM_UP_STEPS = 3
"""DistributedDataParallel rebuilds its buckets after the first step, and codecs fill what they keep."""

ONLY_TRAINING: dict[str, Any] = {
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of a Trainer that is to do nothing else, and to say nothing."""

_MOST_TRIALS = 200  # steps after which compression="auto" must have decided
_LOOK_EVERY = 5  # steps, during its trials


@dataclass(frozen=True)
class TimedFit:
    """What one rank saw.

    Attributes:
        step_seconds: Duration of each timed step.
        gradients: Numbers that are reduced in a step.
        sent_bytes: Payload that this rank sent in a step, by level; empty where the strategy does not count.
        exposed_seconds: What of a step waited for communication, the mean over the timed ones; None where nobody
            measures it.
        choice: What ``compression="auto"`` had decided before the timed steps; empty for other strategies.
        predicted: What the cost model says of each choice, after steps of a fixed one.
        decisions: All that ``compression="auto"`` decided, on rank 0.
    """

    step_seconds: list[float]
    gradients: int
    sent_bytes: dict[str, float] = field(default_factory=dict)
    exposed_seconds: float | None = None
    choice: str = ""
    predicted: dict[str, float] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)


def timed_fit(
    strategy: str | Strategy,
    model: LightningModule,
    data: LightningDataModule | None = None,
    *,
    steps: int,
    is_tuned: bool = False,
    **trainer_arguments: Any,
) -> TimedFit:
    """Trains for some steps. A collective.

    Args:
        strategy: A strategy, or its name.
        model: What is trained.
        data: What it is trained with, unless it knows that itself.
        steps: Number of timed steps, after the warm-up.
        is_tuned: Whether the strategy decides on a codec first, which is waited for.
        **trainer_arguments: Devices, nodes and the like.

    Raises:
        RuntimeError: If no codec was decided on in time, or the data end before the steps.
    """
    timer = _StepTimer(steps, is_tuned)
    seed_everything(1, verbose=False)
    trainer = Trainer(
        strategy=strategy,
        max_steps=WARM_UP_STEPS + steps + (_MOST_TRIALS if is_tuned else 0),
        callbacks=[timer],
        **ONLY_TRAINING,
        **trainer_arguments,
    )
    trainer.fit(model, data)
    observing = trainer.strategy if isinstance(trainer.strategy, ObservingStrategy) else None
    return TimedFit(
        step_seconds=timer.step_seconds(),
        gradients=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        sent_bytes=timer.sent_bytes(),
        exposed_seconds=timer.exposed_seconds(),
        choice=timer.choice,
        predicted=observing.predict_steps(model) if observing is not None else {},
        decisions=timer.decisions(),
    )


class _StepTimer(Callback):
    """Lets the warm-up pass, times the steps that follow, and ends the training."""

    def __init__(self, steps: int, is_tuned: bool) -> None:
        self._steps = steps
        self._is_settled = not is_tuned
        self._seen = 0
        self._left = WARM_UP_STEPS  # steps before the timed ones
        self._ends: list[float] = []
        self._stats: CommStats | None = None
        self._sent_before: Counter[str] = Counter()
        self._exposed_before = 0.0
        self.choice = ""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stats = getattr(trainer.strategy, "comm_stats", None)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self._seen += 1
        if not self._is_settled:
            if self._seen % _LOOK_EVERY == 0:
                self._is_settled = self._look(pl_module.device)
            if self._seen >= _MOST_TRIALS and not self._is_settled:
                raise RuntimeError(f"compression='auto' has not decided on a codec after {self._seen} steps")
            return
        self._left -= 1
        if self._left == 0:
            self._begin()
        if self._left <= 0:
            self._ends.append(time.perf_counter())
        if len(self._ends) > self._steps:
            trainer.should_stop = True

    def step_seconds(self) -> list[float]:
        if len(self._ends) <= self._steps:
            raise RuntimeError(
                f"the training ended after {self._seen} steps, before {self._steps} were timed: give more data, or a"
                " smaller --steps"
            )
        return [end - start for start, end in zip(self._ends, self._ends[1:], strict=False)]

    def sent_bytes(self) -> dict[str, float]:
        if self._stats is None:
            return {}
        sent = Counter(self._stats.bytes_sent)
        sent.subtract(self._sent_before)
        return {level: count / self._steps for level, count in sent.items() if count}

    def exposed_seconds(self) -> float | None:
        if self._stats is None:
            return None
        return (self._stats.exposed_seconds - self._exposed_before) / self._steps

    def decisions(self) -> list[dict[str, Any]]:
        return [vars(decision) for decision in self._stats.decisions] if self._stats is not None else []

    def _begin(self) -> None:
        if self._stats is not None:
            self._sent_before = Counter(self._stats.bytes_sent)
            self._exposed_before = self._stats.exposed_seconds

    def _look(self, device: torch.device) -> bool:
        """Whether rank 0, which alone knows, has seen a decision."""
        assert self._stats is not None
        settled = torch.tensor([len(self._stats.decisions)], device=device)
        if dist.is_initialized():
            dist.broadcast(settled, src=0)
        if self._stats.decisions:
            self.choice = self._stats.decisions[-1].choice
        return bool(settled.item())
