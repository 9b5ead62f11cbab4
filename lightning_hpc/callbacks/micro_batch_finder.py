"""`MicroBatchFinder`: the largest batch that fits, with as much accumulation as the wanted effective batch takes."""

import traceback
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr
from torch import nn
from typing_extensions import override

from lightning_hpc.callbacks.batch_size import count_samples
from lightning_hpc.callbacks.trial_batches import EarlyLoaders, are_loaders_given, trial_batches
from lightning_hpc.callbacks.trial_step import TrialStep
from lightning_hpc.data.seeding import GeneratorStates
from lightning_hpc.memory.batch_search import BatchSearch, divisors
from lightning_hpc.memory.budget_probe import BudgetProbe
from lightning_hpc.memory.default_probe import default_probe
from lightning_hpc.memory.freed_memory import give_back
from lightning_hpc.memory.out_of_memory import is_out_of_memory
from lightning_hpc.memory.probe import PressureProbe
from lightning_hpc.memory.reading import MemoryReading

_ATTRIBUTE = "batch_size"
_FITS, _TOO_LARGE, _FAILED = range(3)
_MARGIN = 0.1
# One to step on, and one with the optimizer's state there.
_BATCHES = 2


class MicroBatchFinder(Callback):
    """Sets the batch size of a rank to the largest that fits, and accumulates up to ``effective_batch_size``.

    That is the number of samples, over all ranks, that every optimizer step sees; ``batch_size`` and
    ``accumulate_grad_batches`` are set to it. At the start of a fit, sizes that divide it are tried: two real batches
    through forward and backward, and the optimizer's step, without the strategy's wrapper. A size fits if that ran, on
    batches that had this size, and took at most nine tenths of the memory. All ranks try the same sizes and take what
    fits on all of them. Nothing of the trials is left: the fit is bitwise that of a run which had these two settings
    from the start.

    The module or the DataModule must make its training loader from its attribute, or hyperparameter, ``batch_size``. A
    resumed fit takes the size from the checkpoint and tries nothing.

    Args:
        effective_batch_size: Samples of an optimizer step, over all ranks.
        min_batch_size: Least samples of a batch on a rank.
        max_batch_size: Most samples of a batch on a rank. None means what the effective batch allows.
        probe: What reads the memory. None means the probe of the device.
        budget_bytes: How much memory there is. None means what the probe says.

    Attributes:
        batch_size: What was found; None before.

    Raises:
        ValueError: If the arguments allow no size; at the start of a fit, if the Trainer, the module or its loaders do
            not go with it, or if the smallest size does not fit.
    """

    def __init__(
        self,
        effective_batch_size: int,
        min_batch_size: int = 1,
        max_batch_size: int | None = None,
        probe: PressureProbe | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        super().__init__()
        most = effective_batch_size if max_batch_size is None else max_batch_size
        for name, number in (("effective_batch_size", effective_batch_size), ("min_batch_size", min_batch_size)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number} is no number of samples; give 1 or more")
        if most < min_batch_size:
            raise ValueError(f"max_batch_size={most} is less than min_batch_size={min_batch_size}")
        self._effective = effective_batch_size
        self._least, self._most = min_batch_size, most
        self._own_probe, self._budget_bytes = probe, budget_bytes
        self._is_restored = False
        self._early_loaders: EarlyLoaders | None = None
        self.batch_size: int | None = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.batch_size is None else {"batch_size": self.batch_size}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batch_size = state_dict.get("batch_size")
        self._is_restored = self.batch_size is not None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or _reason_to_skip(trainer):
            return
        self._release(trainer)  # of a fit that ended without telling
        _require_suitable(trainer, pl_module)
        self._early_loaders = EarlyLoaders(trainer)
        # Schedulers may ask for the number of steps before anything has been tried.
        self._apply(trainer, self._sizes(trainer)[0])

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        reason = _reason_to_skip(trainer)
        if reason is not None:
            rank_zero_info(f"MicroBatchFinder tries nothing with {reason}; batch_size stays as it is")
            return
        assert self._early_loaders is not None
        sizes, steps = self._sizes(trainer), self._early_loaders.steps()
        if not (self._is_restored and self.batch_size in sizes):
            _require_steps(trainer)
            self.batch_size = self._search(trainer, sizes)
        self._is_restored = False
        self._apply(trainer, self.batch_size)
        self._early_loaders.make_anew()
        if self._early_loaders.steps() != steps:  # `limit_train_batches` and `drop_last` count in batches
            _make_schedulers_anew(trainer)
        rank_zero_info(
            f"MicroBatchFinder: batch_size={self.batch_size} on each of {trainer.world_size} ranks with"
            f" accumulate_grad_batches={trainer.accumulate_grad_batches} makes {self._effective} samples a step"
        )

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._release(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release(trainer)

    def _release(self, trainer: pl.Trainer) -> None:
        if self._early_loaders is not None:
            self._early_loaders.close()
            self._early_loaders = None
            trainer.accumulate_grad_batches = 1  # as it was, for the next fit

    def _sizes(self, trainer: pl.Trainer) -> list[int]:
        if self._effective % trainer.world_size:
            raise ValueError(
                f"effective_batch_size={self._effective} does not divide by {trainer.world_size} ranks; give a multiple"
            )
        share = self._effective // trainer.world_size
        sizes = [size for size in divisors(share) if self._least <= size <= self._most]
        if not sizes:
            raise ValueError(
                f"no size from min_batch_size={self._least} to max_batch_size={self._most} divides the {share} samples"
                " of a rank and step; widen them, or give an effective_batch_size with more divisors"
            )
        return sizes

    def _apply(self, trainer: pl.Trainer, size: int | None) -> None:
        assert size is not None
        lightning_setattr(trainer.lightning_module, _ATTRIBUTE, size)
        trainer.accumulate_grad_batches = self._effective // (trainer.world_size * size)

    def _search(self, trainer: pl.Trainer, sizes: list[int]) -> int:
        trials = _Trials(trainer, self._make_probe(trainer))
        search = BatchSearch(sizes)
        while (size := search.size) is not None:
            self._apply(trainer, size)
            search.answer(trials.fits(size))
        if search.largest is None:
            raise ValueError(
                f"not even {sizes[0]} samples fit ({trials.last}). In this order, try: precision='bf16-mixed' or"
                " MemoryAwarePrecision; ActivationCheckpointing; a strategy that shards the model, such as 'fsdp'"
            )
        return search.largest

    def _make_probe(self, trainer: pl.Trainer) -> PressureProbe:
        probe = self._own_probe or default_probe(trainer.strategy.root_device)
        return probe if self._budget_bytes is None else BudgetProbe(probe, self._budget_bytes)


class _Trials:
    """Tries sizes, all ranks the same ones at the same time.

    Args:
        trainer: In a fit.
        probe: What reads the memory.

    Attributes:
        last: What the last trial came to, for people.
    """

    def __init__(self, trainer: pl.Trainer, probe: PressureProbe) -> None:
        self._trainer = trainer
        self._probe = probe
        self._step = TrialStep(trainer)
        self._at_rest = probe.read().used_bytes
        self._measured: tuple[int, int] | None = None
        self.last = ""

    def fits(self, size: int) -> bool:
        """Whether a size fits on every rank.

        Raises:
            Exception: What a trial has raised besides running out of memory; on the other ranks a RuntimeError.
        """
        failure: Exception | None = None
        try:
            outcome = self._try(size)
        except Exception as error:  # the others have to hear of it first
            outcome, failure = _FAILED, error
        strategy = self._trainer.strategy
        worst = int(strategy.reduce(torch.tensor(outcome, device=strategy.root_device), reduce_op="max"))
        if failure is not None:
            raise failure
        if worst == _FAILED:
            raise RuntimeError(f"MicroBatchFinder: another rank has failed with batch_size={size}; see its error")
        verdict = "fits" if worst == _FITS else "does not fit" if outcome == _TOO_LARGE else "does not fit elsewhere"
        rank_zero_info(f"MicroBatchFinder: batch_size={size} {verdict} ({self.last})")
        return worst == _FITS

    def _try(self, size: int) -> int:
        limit = self._probe.read().limit_bytes  # peaks count from here
        expected = self._expected(size)
        # Where the system ends a process that takes too much, nobody learns anything from trying.
        if self._trainer.strategy.root_device.type == "cpu" and expected > limit:
            self.last = f"would take about {_gibibytes(expected)} of {_gibibytes(limit)}"
            return _TOO_LARGE
        with trial_batches(self._trainer, _BATCHES) as (batches, sizes):
            if sizes == {size} and _is_short(size, batches):
                self.last = "the training loader has fewer samples"
                return _TOO_LARGE
            _require_size(size, batches, sizes)
            # The last batch of a small dataset is short, and would say little.
            ran = self._run([each for each in batches if count_samples(each) in (None, size)])
        reading = self._probe.read()
        give_back(self._trainer.strategy.root_device)
        if not ran:
            self.last = f"ran out of memory, of which there are {_gibibytes(limit)}"
            return _TOO_LARGE
        self._measured = (size, reading.used_bytes)
        self.last = f"{_gibibytes(reading.used_bytes)} of {_gibibytes(reading.limit_bytes)}"
        return _FITS if _has_margin(reading) else _TOO_LARGE

    def _run(self, batches: list[Any]) -> bool:
        try:
            self._step.run([batches[0], batches[-1]])
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold what the step had allocated
            return False
        return True

    def _expected(self, size: int) -> float:
        if self._measured is None:
            return 0.0
        measured, used = self._measured
        fixed = min(self._at_rest + self._step.fixed_bytes, used)
        return fixed + (used - fixed) * size / measured


def _reason_to_skip(trainer: pl.Trainer) -> str | None:
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return "fast_dev_run"
    if trainer.limit_train_batches == 0:
        return "limit_train_batches=0"
    return "overfit_batches" if trainer.overfit_batches else None  # type: ignore[attr-defined]


def _require_suitable(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        raise ValueError(
            f"MicroBatchFinder tries steps on one device at a time, which {type(trainer.strategy).__name__} cannot do;"
            " use a single device, 'ddp' or 'hpc'"
        )
    if not pl_module.automatic_optimization:
        raise ValueError("with manual optimization, accumulation is the module's own; set batch_size by hand")
    schedulers = [each for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    if trainer.accumulate_grad_batches != 1 or any(each.going_to_accumulate_grad_batches() for each in schedulers):
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} is set, or scheduled, and MicroBatchFinder sets"
            " it; leave it out, and give effective_batch_size"
        )
    if are_loaders_given(trainer):
        raise ValueError(
            "fit was given a training loader, whose batch size cannot change; make it in train_dataloader of the module"
            " or of a DataModule, from self.batch_size"
        )
    if not lightning_hasattr(pl_module, _ATTRIBUTE):
        raise ValueError(
            f"neither {type(pl_module).__name__} nor its DataModule has an attribute or hyperparameter batch_size; add"
            " one, and make the training loader from it"
        )


def _require_steps(trainer: pl.Trainer) -> None:
    """What only shows once the strategy has set up the model and the optimizers."""
    if len(trainer.optimizers) != 1:
        raise ValueError(f"MicroBatchFinder tries steps of one optimizer, and there are {len(trainer.optimizers)}")
    if getattr(trainer.strategy.model, "static_graph", False):
        raise ValueError(
            "with static_graph=True, DistributedDataParallel takes the first trial for the first step, and ranks drift"
            " apart; leave static_graph out (with accumulation it fails anyway), or set batch_size by hand"
        )
    modules = trainer.lightning_module.modules()
    if trainer.world_size > 1 and any(isinstance(each, nn.SyncBatchNorm) for each in modules):
        raise ValueError(
            "SyncBatchNorm waits in forward for ranks that may have run out of memory in a trial; set batch_size by"
            " hand, to what a run without sync_batchnorm has found"
        )


def _make_schedulers_anew(trainer: pl.Trainer) -> None:
    """Calls ``configure_optimizers`` again, as the number of steps that it was told is another by now."""
    states = GeneratorStates()
    strategy = trainer.strategy
    strategy.setup_optimizers(trainer)
    _optimizers_to_device(strategy.optimizers, strategy.root_device)
    states.restore()


def _is_short(size: int, batches: list[Any]) -> bool:
    """Whether there are not even as many samples as one batch should have."""
    return not batches or (count_samples(batches[0]) or size) < size


def _require_size(size: int, batches: list[Any], sizes: set[int | None]) -> None:
    """So that what is tried is what was meant: a finder that trains on nothing succeeds with every size."""
    if not batches:
        raise ValueError("the training loader has no batch to try")
    known = {each for each in (*sizes, *map(count_samples, batches[:1])) if each is not None}
    if not known:
        raise ValueError(
            "the training loader does not say how large its batches are, and their first entry is no tensor, so nobody"
            " can tell whether they follow batch_size; use a DataLoader with batch_size"
        )
    if known != {size}:
        raise ValueError(
            f"with batch_size={size} the training loader gives batches of {', '.join(map(str, sorted(known)))} samples:"
            " it is not made from the attribute batch_size; make it so"
        )


def _has_margin(reading: MemoryReading) -> bool:
    return reading.used_bytes <= (1 - _MARGIN) * reading.limit_bytes


def _gibibytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
