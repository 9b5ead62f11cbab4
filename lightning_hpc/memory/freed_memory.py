"""Memory that tensors have freed, but that is not there for others yet."""

import ctypes
import functools
import gc
from typing import Any

import torch


def give_back(device: torch.device) -> None:
    """Gives it back: what the caching allocator keeps to the device, what the C library keeps to the system.

    The C library keeps what has been freed below something that is still in use, so a process's resident memory stays
    at its peak. Takes milliseconds, and waits for a CUDA device.

    Args:
        device: Where tensors were freed.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Any:
    """None where the C library has none: it is one of glibc's."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
