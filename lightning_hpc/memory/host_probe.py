"""Reads the memory that a process has on the host, for training on the CPU."""

import os
import time
from pathlib import Path
from weakref import WeakSet

from typing_extensions import override

from lightning_hpc.memory.cgroup import CgroupDirectory, find_directories, parse_cgroups, parse_limit, parse_mounts
from lightning_hpc.memory.probe import PressureProbe
from lightning_hpc.memory.process_memory import ProcessMemory, parse_available
from lightning_hpc.memory.reading import MemoryReading

# Seconds that a limit is taken to hold: to read it costs several times as much as the rest.
_LIMIT_AGE_S = 1.0
# More than a process's status has; it comes in one piece.
_STATUS_BYTES = 2**16
# There is one peak a process. Without knowing of each other, two probes would take each other's peaks away.
_probes: "WeakSet[HostProbe]" = WeakSet()


class HostProbe(PressureProbe):
    """Resident memory of this process, and how much it could have.

    In use is what this process holds, without its children and without pages of files. The limit is that plus what is
    left to it: by the control groups that it is in, by those around them, and by the machine. So other ranks of
    the host and this rank's loader workers make the limit smaller, as other processes on a GPU do.

    A reading resets the kernel's peak (``VmHWM`` in ``/proc/self/status``), so that the next one tells that of the time
    between. Where a process may not do that, the peak is that of its whole life, and is told only when it has risen.

    Args:
        root: Where ``/proc`` and the mount points of control groups are looked for.

    Raises:
        OSError: Where there is no ``/proc``, as on other systems than Linux.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._status_path, self._reset_path = (
            str(self._path(f"/proc/self/{name}")) for name in ("status", "clear_refs")
        )
        groups = parse_cgroups(self._read_or_nothing("/proc/self/cgroup"))
        directories = find_directories(groups, parse_mounts(self._read_or_nothing("/proc/self/mountinfo")))
        self._directories = [each for each in directories if self._path(each.limit_file).exists()]
        # The highest that other probes have read since this one did; or, without resets, of the whole life.
        self._peak_bytes = 0
        self._limit = 0
        self._read_limit_at = 0.0
        _probes.add(self)
        self._read_peak(self._read_process())

    @override
    def read(self) -> MemoryReading:
        """Bytes of this process. Reads one small file, and once a second five or more for the limit."""
        process = self._read_process()
        if time.monotonic() >= self._read_limit_at:
            self._limit = max(process.used_bytes + self._left(), 1)
            self._read_limit_at = time.monotonic() + _LIMIT_AGE_S
        return MemoryReading(self._read_peak(process), self._limit)

    def _read_peak(self, process: ProcessMemory) -> int:
        if self._reset_peak():
            for probe in _probes:
                if probe._root == self._root:
                    probe._peak_bytes = max(probe._peak_bytes, process.peak_bytes)
            peak, self._peak_bytes = self._peak_bytes, 0
            return peak
        if process.peak_bytes <= self._peak_bytes:
            return process.used_bytes
        self._peak_bytes = process.peak_bytes
        return process.peak_bytes

    def _reset_peak(self) -> bool:
        try:
            descriptor = os.open(self._reset_path, os.O_WRONLY)
        except OSError:
            return False
        try:
            return os.write(descriptor, b"5") == 1
        except OSError:
            return False
        finally:
            os.close(descriptor)

    def _left(self) -> int:
        available = parse_available(self._read("/proc/meminfo"))
        return max(min([available, *(self._left_in(each, available) for each in self._directories)]), 0)

    def _left_in(self, directory: CgroupDirectory, available: int) -> int:
        limit = parse_limit(self._read(directory.limit_file))
        if limit is None:
            return available
        return limit - directory.parse_used(self._read(directory.usage_file), self._read(directory.stat_file))

    def _read_process(self) -> ProcessMemory:
        # In training steps: by the system's own calls, which take a third of the time of a file object's.
        descriptor = os.open(self._status_path, os.O_RDONLY)
        try:
            return ProcessMemory.parse(os.read(descriptor, _STATUS_BYTES).decode())
        finally:
            os.close(descriptor)

    def _read(self, path: str) -> str:
        return self._path(path).read_text()

    def _path(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def _read_or_nothing(self, path: str) -> str:
        try:
            return self._read(path)
        except OSError:  # a kernel without control groups
            return ""
