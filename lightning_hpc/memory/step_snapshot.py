"""`StepSnapshot`: a training step that can be undone as long as no optimizer has stepped."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hpc.data.seeding import GeneratorStates
from lightning_hpc.memory.gradient_keeper import GradientKeeper
from lightning_hpc.memory.model_snapshot import ModelSnapshot
from lightning_hpc.memory.nested import tensors_in
from lightning_hpc.memory.optimizer_guard import OptimizerGuard


class StepSnapshot:
    """Random numbers, buffers, attributes, gradients and optimizers as they are before a training step.

    Args:
        watched: Modules whose buffers and attributes the step may change; these are copied.
        others: Modules with buffers that it does not change.
        parameters: All parameters.
        optimizers: What may step.
        batch: What the step is given.
        device: Where it computes.
        is_manual: Whether the step may toggle optimizers, which changes what requires a gradient.
        last: `generators` of the snapshot before this one, which may save a slow look.

    Attributes:
        gradients: What runs the step's backwards.
        generators: The random states.
    """

    def __init__(
        self,
        watched: Iterable[nn.Module],
        others: Sequence[nn.Module],
        parameters: Sequence[nn.Parameter],
        optimizers: Sequence[Optimizer],
        batch: Any,
        device: torch.device,
        *,
        is_manual: bool,
        last: GeneratorStates | None = None,
    ) -> None:
        self.gradients = GradientKeeper(parameters)
        self.generators = GeneratorStates(last)
        self._device = device
        self._device_generator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._model = ModelSnapshot(watched)
        self._requires_grad = [(each, each.requires_grad) for each in parameters] if is_manual else []
        buffers = (buffer for module in others for buffer in module.buffers(recurse=False))
        self._unwatched = [(tensor, tensor._version) for tensor in (*buffers, *tensors_in(batch))]
        self._guards = [OptimizerGuard(optimizer) for optimizer in optimizers]

    def find_changed(self) -> set[nn.Module]:
        """Those of the watched modules that the step has changed."""
        return self._model.find_changed()

    def why_not(self) -> str | None:
        """What stands against `restore`; None if nothing does."""
        if not all(guard.is_intact for guard in self._guards):
            return "an optimizer had begun to change parameters or its state"
        changed = _find_changed(self._unwatched)
        if changed is not None:
            return f"a tensor of shape {tuple(changed.shape)}, of the batch or of a buffer, was changed in place"
        return None

    def restore(self) -> None:
        """Puts everything back."""
        assert self.why_not() is None
        self.gradients.restore()
        self.generators.restore()
        if self._device_generator is not None:
            torch.cuda.set_rng_state(self._device_generator, self._device)
        self._model.restore()
        for parameter, requires_grad in self._requires_grad:
            parameter.requires_grad_(requires_grad)  # a toggled optimizer has switched it off elsewhere
        for guard in self._guards:
            guard.restore()


def _find_changed(tensors: Iterable[tuple[Tensor, int]]) -> Tensor | None:
    return next((tensor for tensor, version in tensors if tensor._version != version), None)
