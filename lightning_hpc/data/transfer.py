"""Who takes the batches of a DataModule to the device: its loaders, ahead of the training, or Lightning."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

_EARLY_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")
"""Hooks that have to see batches in host memory."""


def copying_device(data: pl.LightningDataModule, wrapped: Any, has_transform: bool) -> torch.device | None:
    """The CUDA device that loaders have to take batches to; None where they leave that to Lightning.

    Args:
        data: Whose loaders they are.
        wrapped: The DataModule that it wraps, if it does.
        has_transform: Whether training batches are transformed on the device.

    Raises:
        ValueError: If they are, and a hook would have to be called before.
    """
    trainer: Any = data.trainer
    if trainer is None:
        return None
    for owner in (wrapped, data, trainer.lightning_module):
        for hook in _EARLY_HOOKS:
            if is_overridden(hook, owner) and has_transform:
                raise ValueError(
                    f"{type(owner).__name__} overrides {hook}, which comes before device_transform can have a batch;"
                    " call the transform in on_after_batch_transfer instead"
                )
            if is_overridden(hook, owner):
                return None
    device: torch.device = trainer.strategy.root_device
    return device if device.type == "cuda" else None
