"""`OutOfMemoryRecovery`: runs a step that ran out of memory again, with less."""

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_hpc._compiled import is_compiled
from lightning_hpc.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_hpc.callbacks.idle_hooks import call_all_hooks, skip_idle_hooks
from lightning_hpc.callbacks.step_trace import StepTrace
from lightning_hpc.callbacks.training_step_hook import StepMark, TrainingStepHook
from lightning_hpc.comm.failure_notice import FailureNotice
from lightning_hpc.data.seeding import GeneratorStates
from lightning_hpc.memory.allocator_counts import AllocatorCounts
from lightning_hpc.memory.blocks import find_blocks
from lightning_hpc.memory.compaction import failed_for_pieces
from lightning_hpc.memory.freed_memory import give_back
from lightning_hpc.memory.out_of_memory import TrainingOutOfMemoryError, is_out_of_memory
from lightning_hpc.memory.step_snapshot import StepSnapshot
from lightning_hpc.precision.measured_units import measured_units
from lightning_hpc.precision.memory_aware import MemoryAwarePrecision
from lightning_hpc.precision.saving_estimate import SavingEstimate
from lightning_hpc.precision.unit_bytes import UnitBytes

# What a notice takes to come, at most, after the connection to the rank that sent it broke.
_NOTICE_S = 2.0


class OutOfMemoryRecovery(Callback):
    """Undoes a training step that ran out of memory, makes room, and runs the same batch again.

    Room is made by what the Trainer has, one of these at a time, as long as there is one:

    1. memory in pieces is put together (CUDA: where enough was free in total, the allocator's cache is freed);
    2. `MemoryAwarePrecision`: modules go to low precision, a quarter of what can still be saved at a time;
    3. `ActivationCheckpointing`: all blocks are recomputed, from now on.

    The step starts from the random numbers, buffers, accumulated gradients, metrics and logged values that there were
    before, so it ends bitwise as if it had begun with that room. Where it cannot be undone (an optimizer has begun to
    write, the batch was changed in place), and with several ranks, where the others wait in a collective, the run ends
    with `TrainingOutOfMemoryError` on every rank, which says what would save how much.

    Hooks of the step are called again with it. Python objects that they or ``training_step`` change in place are not
    undone, except lists and dicts that are attributes of a module.

    Attributes:
        recoveries: Number of steps of the current or last fit that were run again and succeeded.

    Raises:
        TrainingOutOfMemoryError: During the fit, if a step does not fit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hook: TrainingStepHook | None = None
        self._notice: FailureNotice | None = None
        self._snapshot: StepSnapshot | None = None
        self._watched: list[nn.Module] | None = None
        self._others: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._units: dict[str, UnitBytes] | None = None
        self._generators: GeneratorStates | None = None
        self.recoveries = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()  # of a fit that ended without telling
        self.recoveries = 0
        self._watched = None
        self._units = None
        self._parameters = list(pl_module.parameters())
        if trainer.world_size > 1:
            self._notice = _make_notice(trainer)
            run: Callable[..., Any] = self._run_or_tell
        else:
            run = self._run_again
        skip_idle_hooks(self, OutOfMemoryRecovery, used=())
        self._hook = TrainingStepHook(trainer, lambda step, batch: run(trainer, step, batch), self._run_backward)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._notice is not None and not isinstance(exception, TrainingOutOfMemoryError):
            text = self._notice.text()
            if text is not None:  # it came while this rank was between two steps
                warnings.warn(f"rank {trainer.global_rank} ends, because {text}", RuntimeWarning, stacklevel=2)
        self._stop()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _run_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._snapshot is None:
            backward(*args, **kwargs)
        else:
            self._snapshot.gradients.run(backward, *args, **kwargs)

    def _run_or_tell(self, trainer: pl.Trainer, step: Callable[[], Any], batch: Any) -> Any:
        """With several ranks: one that fails tells the others, which may wait for it."""
        assert self._notice is not None
        try:
            return self._measured(trainer, step)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                where = f"rank {trainer.global_rank} in step {trainer.global_step}"
                self._notice.tell(f"{where} ran out of memory: {error}")
                raise self._final_error(trainer, error, "and other ranks wait for this one") from error
            text = self._notice.text(_NOTICE_S)
            if text is None:
                raise
            raise TrainingOutOfMemoryError(f"this rank ends, because {text}") from error

    def _run_again(self, trainer: pl.Trainer, step: Callable[[], Any], batch: Any) -> Any:
        """With one rank: as often as there is room to make."""
        if batch is None:
            return step()  # it takes its batch from an iterator, and would take another one
        number, ways = trainer.global_step, list[str]()
        while True:
            mark = self._take_snapshot(trainer, batch)
            failure = None
            try:
                outputs = self._measured(trainer, step)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                in_pieces = _failed_for_pieces(error, trainer.strategy.root_device)
                traceback.clear_frames(error.__traceback__)  # they hold what the step had allocated
                failure = error
            if failure is None:
                self._finish(trainer, number, ways)
                return outputs
            way = self._make_room(trainer, failure, mark, in_pieces and not ways)
            ways.append(way)
            rank_zero_info(f"OutOfMemoryRecovery: step {number} ran out of memory and runs again; {way}")

    def _measured(self, trainer: pl.Trainer, step: Callable[[], Any]) -> Any:
        """Runs the step; the first one shows what the advice at the end of the memory needs to know."""
        module = trainer.lightning_module
        if self._units is not None or isinstance(trainer.precision_plugin, MemoryAwarePrecision) or is_compiled(module):
            return step()
        with measured_units(module) as self._units:
            return step()

    def _take_snapshot(self, trainer: pl.Trainer, batch: Any) -> StepMark:
        assert self._hook is not None
        mark = self._hook.mark()
        module = trainer.lightning_module
        watched = list(module.modules()) if self._watched is None else self._watched
        self._snapshot = StepSnapshot(
            [*watched, *mark.results],
            self._others,
            self._parameters,
            trainer.optimizers,
            batch,
            trainer.strategy.root_device,
            is_manual=not module.automatic_optimization,
            last=self._generators,
        )
        return mark

    def _finish(self, trainer: pl.Trainer, number: int, ways: list[str]) -> None:
        assert self._snapshot is not None
        if self._watched is None:
            changed = self._snapshot.find_changed()
            modules = list(trainer.lightning_module.modules())
            # Lightning and its users set attributes of the LightningModule itself at any time.
            self._watched = [module for module in modules if module in changed or module is trainer.lightning_module]
            self._others = [module for module in modules if module._buffers and module not in self._watched]
        self._generators, self._snapshot = self._snapshot.generators, None
        if ways:
            self.recoveries += 1
            step_trace = StepTrace.find(trainer)
            if step_trace is not None:
                step_trace.write_event("out_of_memory_recovery", {"step": number, "ways": ways})

    def _make_room(self, trainer: pl.Trainer, failure: BaseException, mark: StepMark, in_pieces: bool) -> str:
        """Undoes the step, and says what the next attempt has gained."""
        assert self._hook is not None
        assert self._snapshot is not None
        reason = self._snapshot.why_not()
        if reason is not None:
            raise self._final_error(trainer, failure, f"and cannot run again, since {reason}") from failure
        self._snapshot.restore()
        self._hook.forget(mark)
        give_back(trainer.strategy.root_device)
        if in_pieces:
            return "memory in pieces was put together"
        plugin = trainer.precision_plugin
        if isinstance(plugin, MemoryAwarePrecision) and (switch := plugin.lower_one_level()) is not None:
            return f"{', '.join(switch.units)} went to low precision"
        checkpointing = _find_checkpointing(trainer)
        if checkpointing is not None and checkpointing.checkpoint_all():
            return "all blocks are recomputed from now on"
        raise self._final_error(trainer, failure, "and nothing is left that would make room") from failure

    def _final_error(self, trainer: pl.Trainer, failure: BaseException, why: str) -> TrainingOutOfMemoryError:
        where = f"rank {trainer.global_rank}" if trainer.world_size > 1 else "the process"
        return TrainingOutOfMemoryError(
            f"{where} ran out of memory in step {trainer.global_step}, {why}: {failure}\n"
            + self._estimate(trainer).advice()
        )

    def _estimate(self, trainer: pl.Trainer) -> SavingEstimate:
        module, plugin = trainer.lightning_module, trainer.precision_plugin
        units, low = self._units or {}, list[str]()
        if isinstance(plugin, MemoryAwarePrecision):
            units, low = plugin.measured, plugin.low_modules
        checkpointing = _find_checkpointing(trainer)
        recomputed = [] if checkpointing is None else checkpointing.checkpointed
        return SavingEstimate.of(
            module,
            trainer.optimizers,
            units,
            low,
            blocks=[name for name in find_blocks(module).modules if name not in recomputed],
        )

    def _stop(self) -> None:
        self._snapshot = self._generators = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            call_all_hooks(self)
        if self._notice is not None:
            self._notice.close()
            self._notice = None


def _find_checkpointing(trainer: pl.Trainer) -> ActivationCheckpointing | None:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, ActivationCheckpointing)), None)


def _failed_for_pieces(error: BaseException, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    counts = AllocatorCounts.from_stats(torch.cuda.memory_stats(device))
    return failed_for_pieces(error, counts, torch.cuda.mem_get_info(device)[0])


def _make_notice(trainer: pl.Trainer) -> FailureNotice:
    group = dist.group.WORLD
    assert group is not None
    # Private, but the ranks have no other place in common that answers while they wait in a collective.
    store = dist.distributed_c10d._get_default_store()
    return FailureNotice(store, trainer.global_rank, trainer.world_size, interrupt=group.abort)
