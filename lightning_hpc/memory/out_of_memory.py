"""Errors that say that memory has run out."""

import torch


class TrainingOutOfMemoryError(torch.OutOfMemoryError):
    """A training step does not fit, and nothing is left to try; the text says what would help, and how much."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation of a tensor has failed, on a device or on the host.

    The host's allocator raises a plain `RuntimeError`, so its text decides.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
