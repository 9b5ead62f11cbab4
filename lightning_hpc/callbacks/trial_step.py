"""`TrialStep`: training steps that leave nothing behind."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_hpc.data.seeding import GeneratorStates
from lightning_hpc.memory.model_snapshot import ModelSnapshot
from lightning_hpc.memory.nested import tensors_in


class TrialStep:
    """Runs training steps of a module, and puts back what they have changed.

    Only what the module computes runs, without the strategy's wrapper: a rank that fails leaves nobody waiting in a
    collective. What the module logs is thrown away. Hooks of the loop are not called.

    Put back are parameters, which are kept on the host, gradients, buffers, attributes and metrics of all modules, the
    optimizer with its state, and the random numbers of Python, NumPy and PyTorch on host and device.

    Args:
        trainer: In a fit with automatic optimization.

    Attributes:
        fixed_bytes: What the last run took whatever the size of its batches: gradients, the optimizer's state, and the
            copy of the parameters if that is on the same device. 0 before.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._module: Any = trainer.lightning_module
        (self._optimizer,) = trainer.optimizers
        self._device = trainer.strategy.root_device
        self.fixed_bytes = 0

    def run(self, batches: Sequence[Any]) -> None:
        """Forward, backward and optimizer step on the first batch, then forward and backward on the others.

        So the optimizer's state is there, as in all steps but the first, and gradients accumulate.

        Args:
            batches: On the host, of the training loader.

        Raises:
            Exception: Whatever the module raises, after everything has been put back.
        """
        model = ModelSnapshot(self._module.modules())
        parameters = [(each, each.detach().to("cpu", copy=True), each.grad) for each in self._module.parameters()]
        groups = [dict(group) for group in self._optimizer.param_groups]
        attributes = vars(self._optimizer).copy()  # its state, and what a step of its own counts
        self._optimizer.state = defaultdict(dict)
        generators = GeneratorStates()
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        try:
            self._run(batches)
        finally:
            vars(self._optimizer).clear()
            vars(self._optimizer).update(attributes)
            for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(saved)
            with torch.no_grad():
                for parameter, value, gradient in parameters:
                    parameter.copy_(value)
                    parameter.grad = gradient
            self._clear_reducer()
            model.restore()
            generators.restore()
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, self._device)

    def _run(self, batches: Sequence[Any]) -> None:
        # The loop collects what is logged, and there is none.
        self._module.log = self._module.log_dict = _log_nothing
        first, *others = batches
        step: Any = type(self._optimizer).step  # schedulers count the calls of the instance's own
        step(self._optimizer, lambda: self._loss(first, 0))
        self.fixed_bytes = self._count_fixed_bytes()
        for index, batch in enumerate(others, start=1):
            self._loss(batch, index)

    def _clear_reducer(self) -> None:
        """Has `DistributedDataParallel` forget which parameters took part, which its hooks note in every backward."""
        wrapper = self._trainer.strategy.model
        if isinstance(wrapper, DistributedDataParallel):
            wrapper.reducer._reset_state()

    def _count_fixed_bytes(self) -> int:
        parameters = list(self._module.parameters())
        copied = parameters if self._device.type == "cpu" else []
        gradients = [each.grad for each in parameters if each.grad is not None]
        state = tensors_in(list(self._optimizer.state.values()))
        return sum(each.nbytes for each in (*copied, *gradients, *state))

    def _loss(self, batch: Any, index: int) -> Tensor:
        plugin = self._trainer.precision_plugin
        with torch.enable_grad():
            ready = self._module._on_before_batch_transfer(plugin.convert_input(batch))  # private, but the loop's way
            moved = self._trainer.strategy.batch_to_device(ready, self._device)
            with plugin.forward_context():
                output = self._module.training_step(moved, index)
            loss = output["loss"] if isinstance(output, dict) else output
            if not isinstance(loss, Tensor):
                raise ValueError(f"training_step returned a {type(output).__name__} without a loss; it cannot be tried")
            loss.backward()
        return loss.detach()


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    pass
