import pytest

from lightning_hpc.memory.cgroup import (
    Cgroup,
    CgroupDirectory,
    CgroupMount,
    find_directories,
    parse_cgroups,
    parse_limit,
    parse_mounts,
)

SECOND = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
BOTH = """\
22 28 0:21 / /proc rw,nosuid shared:14 - proc proc rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 master:2 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


def paths(groups: str, mounts: str) -> list[str]:
    return [each.path for each in find_directories(parse_cgroups(groups), parse_mounts(mounts))]


def test_groups_of_version_2() -> None:
    assert parse_cgroups("0::/user.slice/session-1.scope\n") == (Cgroup(2, "/user.slice/session-1.scope"),)


def test_groups_of_a_machine_with_both_versions() -> None:
    text = "9:name=systemd:/\n4:cpu,memory:/job:1/step\n3:cpuset:/other\n0::/\n"
    assert parse_cgroups(text) == (Cgroup(1, "/job:1/step"), Cgroup(2, "/"))


def test_mounts_with_and_without_optional_fields() -> None:
    assert parse_mounts(SECOND) == (CgroupMount(2, "/", "/sys/fs/cgroup"),)
    assert parse_mounts(BOTH) == (
        CgroupMount(1, "/", "/sys/fs/cgroup/memory"),
        CgroupMount(2, "/", "/sys/fs/cgroup/unified"),
    )


def test_a_mount_point_with_a_space() -> None:
    assert parse_mounts(SECOND.replace("/sys/fs/cgroup", r"/my\040disk"))[0].point == "/my disk"


def test_all_groups_around_the_process_are_found_the_innermost_first() -> None:
    assert paths("0::/slurm/job_7/step_0\n", SECOND) == [
        "/sys/fs/cgroup/slurm/job_7/step_0",
        "/sys/fs/cgroup/slurm/job_7",
        "/sys/fs/cgroup/slurm",
        "/sys/fs/cgroup",
    ]


def test_a_machine_with_both_versions_has_both_hierarchies() -> None:
    assert paths("4:memory:/a\n0::/\n", BOTH) == [
        "/sys/fs/cgroup/memory/a",
        "/sys/fs/cgroup/memory",
        "/sys/fs/cgroup/unified",
    ]


def test_a_container_that_sees_the_hosts_path_but_mounts_its_own_group() -> None:
    mounts = "1 2 0:3 /docker/1f /sys/fs/cgroup/memory ro - cgroup memory rw,memory\n"
    assert paths("4:memory:/docker/1f\n", mounts) == ["/sys/fs/cgroup/memory"]
    assert paths("4:memory:/docker/1f/inner\n", mounts) == ["/sys/fs/cgroup/memory/inner", "/sys/fs/cgroup/memory"]


@pytest.mark.parametrize("path", ["/../outside", "/elsewhere"])
def test_a_group_outside_of_the_mount_leaves_the_mount_itself(path: str) -> None:
    mounts = "1 2 0:3 /mine /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    assert paths(f"0::{path}\n", mounts) == ["/sys/fs/cgroup"]


def test_no_hierarchy_is_mounted() -> None:
    assert paths("0::/a\n", "22 28 0:21 / /proc rw - proc proc rw\n") == []


def test_limits() -> None:
    assert parse_limit("max\n") is None
    assert parse_limit("9223372036854771712\n") is None
    assert parse_limit("1073741824\n") == 2**30


def test_the_cache_of_files_can_be_taken_back() -> None:
    second = CgroupDirectory(2, "/g")
    assert second.parse_used("1000\n", "anon 500\nfile 400\ninactive_file 250\nactive_file 50\nshmem 100\n") == 700
    assert (second.limit_file, second.usage_file) == ("/g/memory.max", "/g/memory.current")
    first = CgroupDirectory(1, "/g")
    stat = "cache 1\ninactive_file 0\ntotal_inactive_file 250\ntotal_active_file 50\n"
    assert first.parse_used("1000\n", stat) == 700
    assert (first.limit_file, first.usage_file) == ("/g/memory.limit_in_bytes", "/g/memory.usage_in_bytes")
    # The two files are read one after the other.
    assert first.parse_used("100\n", stat) == 0
