"""What ``/proc`` says of a process's memory and of the machine's."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessMemory:
    """Resident memory of a process.

    Pages of files are not in it: the kernel takes them back when it needs them, whatever a mapped data set may hold.

    Attributes:
        used_bytes: Anonymous and shared memory.
        peak_bytes: Its highest value since the process began, as far as the pages of files have not changed since.
    """

    used_bytes: int
    peak_bytes: int

    @classmethod
    def parse(cls, text: str) -> "ProcessMemory":
        """Parses ``/proc/PID/status``. Kernels without the split by kind count all pages.

        Raises:
            ValueError: If it has no ``VmRSS``.
        """
        kilobytes = _kilobytes(text)
        if "VmRSS" not in kilobytes:
            raise ValueError("the process's status has no VmRSS")
        resident, files = kilobytes["VmRSS"], kilobytes.get("RssFile", 0)
        peak = max(kilobytes.get("VmHWM", 0), resident)
        return cls((resident - files) * 1024, (peak - files) * 1024)


def parse_available(text: str) -> int:
    """Bytes that ``/proc/meminfo`` says can be had without swapping.

    Raises:
        ValueError: If it does not say.
    """
    kilobytes = _kilobytes(text)
    if "MemAvailable" not in kilobytes:
        raise ValueError("the machine's meminfo has no MemAvailable")
    return kilobytes["MemAvailable"] * 1024


def _kilobytes(text: str) -> dict[str, int]:
    """The lines of the form ``Name:   123 kB``."""
    words = (line.split() for line in text.splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(value) for name, value, _ in words}
