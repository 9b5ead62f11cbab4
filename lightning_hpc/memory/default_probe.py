"""The probe that suits a device."""

import torch

from lightning_hpc.memory.cuda_probe import CudaProbe
from lightning_hpc.memory.host_probe import HostProbe
from lightning_hpc.memory.probe import PressureProbe


def default_probe(device: torch.device) -> PressureProbe:
    """Makes the probe of the memory that fills up when training on ``device``.

    Raises:
        ValueError: If there is none for this kind of device.
        OSError: For the CPU of a system without ``/proc``.
    """
    if device.type == "cuda":
        return CudaProbe(device)
    if device.type == "cpu":
        return HostProbe()
    raise ValueError(
        f"no probe knows the memory of {str(device)!r}; give CallableProbe(function) with a function that returns"
        " MemoryReading(used_bytes, limit_bytes)"
    )
