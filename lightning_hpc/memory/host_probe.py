"""Reads the memory that a process has on the host, for training on the CPU."""

from pathlib import Path

from typing_extensions import override

from lightning_hpc.memory.cgroup import CgroupDirectory, find_directories, parse_cgroups, parse_limit, parse_mounts
from lightning_hpc.memory.probe import PressureProbe
from lightning_hpc.memory.process_memory import ProcessMemory, parse_available
from lightning_hpc.memory.reading import MemoryReading


class HostProbe(PressureProbe):
    """Resident memory of this process, and how much it could have.

    In use is what this process holds, without its children and without pages of files. The limit is that plus what is
    left to it: by the control groups that it is in, by those around them, and by the machine. So other ranks of
    the host and this rank's loader workers make the limit smaller, as other processes on a GPU do.

    The peak is that of the whole life of the process, so a call tells it only if it has risen since the last one.

    Args:
        root: Where ``/proc`` and the mount points of control groups are looked for.

    Raises:
        OSError: Where there is no ``/proc``, as on other systems than Linux.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        groups = parse_cgroups(self._read_or_nothing("/proc/self/cgroup"))
        directories = find_directories(groups, parse_mounts(self._read_or_nothing("/proc/self/mountinfo")))
        self._directories = [each for each in directories if self._path(each.limit_file).exists()]
        self._peak_bytes = self._read_process().peak_bytes

    @override
    def read(self) -> MemoryReading:
        """Bytes of this process. Reads five small files or more, which takes about 0.15 ms."""
        process = self._read_process()
        used = process.used_bytes
        if process.peak_bytes > self._peak_bytes:
            used = self._peak_bytes = process.peak_bytes
        return MemoryReading(used, max(process.used_bytes + self._left(), 1))

    def _left(self) -> int:
        available = parse_available(self._read("/proc/meminfo"))
        return max(min([available, *(self._left_in(each, available) for each in self._directories)]), 0)

    def _left_in(self, directory: CgroupDirectory, available: int) -> int:
        limit = parse_limit(self._read(directory.limit_file))
        if limit is None:
            return available
        return limit - directory.parse_used(self._read(directory.usage_file), self._read(directory.stat_file))

    def _read_process(self) -> ProcessMemory:
        return ProcessMemory.parse(self._read("/proc/self/status"))

    def _read(self, path: str) -> str:
        return self._path(path).read_text()

    def _path(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def _read_or_nothing(self, path: str) -> str:
        try:
            return self._read(path)
        except OSError:  # a kernel without control groups
            return ""
