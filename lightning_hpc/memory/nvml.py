"""What NVML says of a GPU: all processes together, where PyTorch knows its own."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NvmlReading:
    """Figures of a GPU at one time. None where it has no such figure.

    Attributes:
        used_bytes: In use by all processes and the driver.
        utilization: Part of the driver's last sample period (a sixth of a second to a second) in which a kernel ran,
            0 to 1. A slice of a GPU (MIG) has none.
    """

    used_bytes: int | None = None
    utilization: float | None = None


class NvmlDevice:
    """A GPU, found by its UUID: NVML's index is not CUDA's (pytorch#94472).

    Without the module `pynvml`, without a driver, or if NVML does not know the GPU, its readings are empty.

    Args:
        uuid: As CUDA has it, without the prefix ``GPU-`` or ``MIG-``.
    """

    def __init__(self, uuid: str) -> None:
        self._nvml: Any = _start()
        self._handle: Any = None
        for name in (f"GPU-{uuid}", f"MIG-{uuid}") if self._nvml is not None else ():
            try:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(name)
                break
            except self._nvml.NVMLError:
                continue

    def read(self) -> NvmlReading:
        """Its figures now."""
        if self._handle is None:
            return NvmlReading()
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        return NvmlReading(
            used_bytes=None if memory is None else int(memory.used),
            utilization=None if rates is None else rates.gpu / 100,
        )

    def close(self) -> None:
        """Gives NVML back. Readings are empty from now on."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml = self._handle = None

    def _ask(self, function: str) -> Any:
        try:
            return getattr(self._nvml, function)(self._handle)
        except self._nvml.NVMLError:  # this GPU has no such figure, or is lost
            return None


def _start() -> Any:
    """The module `pynvml`, ready for use, or None."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
