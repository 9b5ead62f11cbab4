"""Whether Lightning runs a module compiled."""

import lightning.pytorch as pl


def is_compiled(module: pl.LightningModule) -> bool:
    """Whether the whole LightningModule was given to the Trainer as what `torch.compile` returns."""
    # Private: Lightning unwraps a compiled module and leaves no other trace of it.
    return module._compiler_ctx is not None
