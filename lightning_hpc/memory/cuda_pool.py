"""`CudaPool`: what PyTorch's caching allocator holds of a CUDA device, set up and sized."""

import os
import sys

import torch

from lightning_hpc.memory.cuda_peak import CudaPeak

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class CudaPool:
    """The pool of one device.

    Args:
        device: A CUDA device; without an index the current one.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._peak = CudaPeak(self._device)

    def peak_bytes(self) -> int:
        """Most bytes allocated since the last call, or since this object was made."""
        return self._peak.read()

    def reserve(self, size: int) -> int:
        """Makes the pool so large that ``size`` bytes fit in what is allocated and in one piece besides.

        What the pool had free is given back first, since it may be in many pieces.

        Returns:
            How many bytes the pool has then.

        Raises:
            torch.OutOfMemoryError: If the device does not have that much; the pool then has no free piece.
        """
        torch.cuda.empty_cache()
        missing = size - torch.cuda.memory_allocated(self._device)
        if missing > 0:
            # The cache keeps it when it is freed at once.
            torch.empty(missing, dtype=torch.uint8, device=self._device)
        return torch.cuda.memory_reserved(self._device)


def use_expandable_segments() -> None:
    """Lets what the process allocates from now on lie in segments that can grow."""
    settings = ",".join(filter(None, (_own_settings(), "expandable_segments:True")))
    torch.cuda.memory._set_allocator_settings(settings)  # private, but what else there is must be set before a start


def why_not_expandable() -> str | None:
    """What stands against expandable segments in this process; None if nothing that can be seen does."""
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":
        return f"the allocator is {backend}, which has none"
    if sys.platform != "linux" or torch.version.hip is not None:
        return "PyTorch has them for CUDA on Linux only"
    if "expandable_segments" in _own_settings():
        return "the environment decides about them"
    if os.environ.get("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "0").lower() in ("1", "true", "yes", "on", "y"):
        return "NCCL registers segments with TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK, which does not go with them"
    return None


def why_not_in_one_piece() -> str | None:
    """What stands against one large piece in the pool; None if nothing does."""
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":
        return f"the allocator is {backend}, which sizes its pool itself"
    if "max_split_size_mb" in _own_settings():
        return "max_split_size_mb keeps large pieces whole, so that nothing smaller would fit into them"
    return None


def _own_settings() -> str:
    """Those of the environment; of two variables the general one counts."""
    return next((os.environ[name] for name in _SETTINGS if os.environ.get(name)), "")
