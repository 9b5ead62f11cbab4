"""Which control groups limit a process's memory, and how much they leave.

Groups are nested, and each may have a limit: a container's own may be without one while that of the job around it
is what ends the process. So all that can be seen count. Both versions of the interface are read; on a machine
that mounts both, the memory controller is in one of them, and the other has no files for it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
# With the prefix, version 1 includes the groups below, as version 2 always does.
_CACHE = {1: ("total_inactive_file", "total_active_file"), 2: ("inactive_file", "active_file")}

_NO_LIMIT = 2**62


@dataclass(frozen=True)
class Cgroup:
    """The group of a process in a hierarchy that may limit memory.

    Attributes:
        version: 1 or 2.
        path: Path within the hierarchy.
    """

    version: int
    path: str


@dataclass(frozen=True)
class CgroupMount:
    """Where a hierarchy that may limit memory is mounted.

    Attributes:
        version: 1 or 2.
        root: Path within the hierarchy of what is mounted.
        point: Where.
    """

    version: int
    root: str
    point: str


@dataclass(frozen=True)
class CgroupDirectory:
    """The files of a group.

    Attributes:
        version: 1 or 2.
        path: Absolute path.
    """

    version: int
    path: str

    @property
    def limit_file(self) -> str:
        """Holds the limit."""
        return f"{self.path}/{_FILES[self.version][0]}"

    @property
    def usage_file(self) -> str:
        """Holds the bytes in use, page cache included."""
        return f"{self.path}/{_FILES[self.version][1]}"

    @property
    def stat_file(self) -> str:
        """Holds what they are in use for."""
        return f"{self.path}/memory.stat"

    def parse_used(self, usage: str, stat: str) -> int:
        """Bytes that the group uses and the kernel cannot take back: without the cache of files.

        Args:
            usage: Text of `usage_file`.
            stat: Text of `stat_file`.
        """
        counts = dict(line.split() for line in stat.splitlines())
        cache = sum(int(counts.get(name, 0)) for name in _CACHE[self.version])
        return max(int(usage) - cache, 0)


def parse_limit(text: str) -> int | None:
    """Bytes of a limit file; None for no limit: ``max``, in version 1 the highest multiple of a page below 2**63."""
    text = text.strip()
    return None if text == "max" or int(text) > _NO_LIMIT else int(text)


def parse_cgroups(text: str) -> tuple[Cgroup, ...]:
    """Parses ``/proc/PID/cgroup``: lines of the form ``hierarchy:controllers:path``."""
    groups = []
    for line in text.splitlines():
        hierarchy, controllers, path = line.split(":", maxsplit=2)
        if hierarchy == "0":
            groups.append(Cgroup(2, path))
        elif "memory" in controllers.split(","):
            groups.append(Cgroup(1, path))
    return tuple(groups)


def parse_mounts(text: str) -> tuple[CgroupMount, ...]:
    """Parses ``/proc/PID/mountinfo``."""
    mounts = []
    for line in text.splitlines():
        # Any number of optional fields lies between the mount point's options and the dash.
        place, _, kind = line.partition(" - ")
        root, point = (_unescape(field) for field in place.split()[3:5])
        filesystem, _, options = kind.split(maxsplit=2)
        if filesystem == "cgroup2":
            mounts.append(CgroupMount(2, root, point))
        elif filesystem == "cgroup" and "memory" in options.split(","):
            mounts.append(CgroupMount(1, root, point))
    return tuple(mounts)


def find_directories(groups: Sequence[Cgroup], mounts: Sequence[CgroupMount]) -> tuple[CgroupDirectory, ...]:
    """The directories of a process's groups and of those around them, the innermost first.

    Some may lack the files: the hierarchy's root, and all of a hierarchy without a memory controller.
    """
    return tuple(
        CgroupDirectory(group.version, str(PurePosixPath(mount.point) / inside))
        for group in groups
        for mount in mounts
        if mount.version == group.version
        for inside in _upwards(group.path, mount.root)
    )


def _upwards(path: str, root: str) -> list[PurePosixPath]:
    """``path`` and its parents up to ``root``, relative to it."""
    group = PurePosixPath(path)
    # A group outside of what is mounted, as a container with a namespace of its own may see it: `/../…`.
    if ".." in group.parts or not group.is_relative_to(root):
        return [PurePosixPath()]
    inside = group.relative_to(root)
    return [inside, *inside.parents]


def _unescape(field: str) -> str:
    """Spaces and the like stand as octal numbers in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
