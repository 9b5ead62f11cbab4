"""Page-locked slots: CUDA copies from them by itself, while the CPU goes on."""

import contextlib
import os
import warnings
import weakref

import torch
from torch import cuda

from lightning_hpc.data.mapping import SharedMapping

_PORTABLE = 1  # cudaHostRegisterPortable: for the contexts of all devices


class PageLock:
    """Page-locks ranges of a mapping, one by one: all of it would be more than the machine has.

    A range stays locked until `unlock`, or until nobody holds this object any more; the memory stays mapped as long.

    Args:
        mapping: Where the ranges are, in this process.
        device: A CUDA device that they are copied to.
    """

    def __init__(self, mapping: SharedMapping, device: torch.device) -> None:
        self._base, self._device = mapping.as_tensor().data_ptr(), device
        self._locked: set[int] = set()  # their addresses
        self._is_refused = False
        weakref.finalize(self, _unlock_all, os.getpid(), mapping, device, self._locked).atexit = False

    def lock(self, offset: int, numel: int) -> None:
        """Locks a range of whole pages; once CUDA has refused one, no more are tried, and a warning says so."""
        if self._is_refused:
            return
        with cuda.device(self._device):
            refusal = cuda.cudart().cudaHostRegister(self._base + offset, numel, _PORTABLE)
            if not int(refusal):
                self._locked.add(self._base + offset)
                return
            _forget_error(self._device)
        self._is_refused = True
        warnings.warn(
            f"CUDA cannot page-lock {numel / 2**20:.0f} MiB for a batch (error {int(refusal)}:"
            f" {cuda.cudart().cudaGetErrorString(refusal)}); batches are copied to the device from memory that is not"
            " locked, which is slower. Allow the process or its container to lock more memory, or use smaller batches,"
            " fewer workers or a smaller prefetch_factor",
            RuntimeWarning,
            stacklevel=2,
        )

    def unlock(self, offset: int) -> None:
        """Unlocks the range that begins there, if it is locked. Nothing may be copied from it any more."""
        if self._base + offset in self._locked:
            self._locked.remove(self._base + offset)
            _unlock(self._base + offset, self._device)


def _unlock_all(owner: int, mapping: SharedMapping, device: torch.device, locked: set[int]) -> None:
    """Unlocks what is left. The mapping is an argument so that it lasts until then."""
    while locked and os.getpid() == owner:  # a fork has copied the addresses; the locks are not its own
        with contextlib.suppress(RuntimeError):  # a device that has failed holds no locks any more
            _unlock(locked.pop(), device)


def _unlock(address: int, device: torch.device) -> None:
    with cuda.device(device):
        if int(cuda.cudart().cudaHostUnregister(address)):
            _forget_error(device)


def _forget_error(device: torch.device) -> None:
    """Takes the error that CUDA keeps for the next kernel: whoever launches that would be blamed.

    The bindings that PyTorch has of the CUDA runtime can register memory, but not ask for this error.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
