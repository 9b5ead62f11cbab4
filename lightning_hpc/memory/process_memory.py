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
        resident, files = _find(text, "VmRSS"), _find(text, "RssFile") or 0
        if resident is None:
            raise ValueError("the process's status has no VmRSS")
        peak = max(_find(text, "VmHWM") or 0, resident)
        return cls((resident - files) * 1024, (peak - files) * 1024)


def parse_available(text: str) -> int:
    """Bytes that ``/proc/meminfo`` says can be had without swapping.

    Raises:
        ValueError: If it does not say.
    """
    available = _find(text, "MemAvailable")
    if available is None:
        raise ValueError("the machine's meminfo has no MemAvailable")
    return available * 1024


def _find(text: str, name: str) -> int | None:
    """The kilobytes in a line of the form ``Name:   123 kB``."""
    _, _, after = f"\n{text}".partition(f"\n{name}:")
    if not after:
        return None
    number, unit = after.split(None, 2)[:2]
    return int(number) if unit == "kB" else None
