import mmap
from pathlib import Path

import pytest
import torch

from lightning_hpc.memory import HostProbe, MemoryReading, host_probe

MB = 2**20


class Host:
    """The files that the probe reads."""

    def __init__(self, root: Path, groups: str, mounts: str) -> None:
        self.root = root
        self.write("/proc/self/cgroup", groups)
        self.write("/proc/self/mountinfo", mounts)
        self.set_process(resident=100, peak=100)
        self.write("/proc/meminfo", f"MemTotal: {8000 * 1024} kB\nMemAvailable: {4000 * 1024} kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def set_process(self, resident: int, peak: int, files: int = 0) -> None:
        self.write(
            "/proc/self/status",
            f"VmHWM: {peak * 1024} kB\nVmRSS: {resident * 1024} kB\nRssFile: {files * 1024} kB\n",
        )

    def set_group(self, path: str, limit: int | str, used: int, cache: int = 0) -> None:
        text = limit if isinstance(limit, str) else f"{limit * MB}"
        self.write(f"{path}/memory.max", f"{text}\n")
        self.write(f"{path}/memory.current", f"{used * MB}\n")
        self.write(f"{path}/memory.stat", f"anon 1\ninactive_file {cache * MB}\n")


@pytest.fixture(autouse=True)
def limits_are_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_probe, "_LIMIT_AGE_S", 0.0)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path, "0::/job/step\n", "30 23 0:26 / /cgroup rw - cgroup2 cgroup2 rw\n")


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    host = Host(tmp_path, "", "")
    assert HostProbe(host.root).read() == MemoryReading(100 * MB, 4100 * MB)
    (tmp_path / "proc/self/cgroup").unlink()
    assert HostProbe(host.root).read().limit_bytes == 4100 * MB


def test_a_limit_of_max_is_the_machines(host: Host) -> None:
    host.set_group("/cgroup/job/step", "max", used=300)
    assert HostProbe(host.root).read().limit_bytes == 4100 * MB


def test_the_group_that_leaves_least_counts_wherever_it_is(host: Host) -> None:
    host.set_group("/cgroup/job/step", 2000, used=300)
    assert HostProbe(host.root).read().limit_bytes == 1800 * MB
    # Other processes of the job fill the group around.
    host.set_group("/cgroup/job", 3000, used=2900, cache=100)
    assert HostProbe(host.root).read() == MemoryReading(100 * MB, 300 * MB)


def test_a_full_group_is_full_pressure(host: Host) -> None:
    host.set_group("/cgroup/job/step", 100, used=120)
    assert HostProbe(host.root).read().pressure == 1


def test_a_limit_may_change(host: Host) -> None:
    host.set_group("/cgroup/job/step", "max", used=300)
    probe = HostProbe(host.root)
    host.set_group("/cgroup/job/step", 500, used=300)
    assert probe.read().limit_bytes == 300 * MB


def test_version_1_writes_a_huge_number_for_no_limit(tmp_path: Path) -> None:
    host = Host(tmp_path, "4:memory:/\n", "35 31 0:32 / /cgroup rw - cgroup cgroup rw,memory\n")
    host.write("/cgroup/memory.limit_in_bytes", "9223372036854771712\n")
    host.write("/cgroup/memory.usage_in_bytes", "1000\n")
    host.write("/cgroup/memory.stat", "total_inactive_file 0\n")
    assert HostProbe(host.root).read().limit_bytes == 4100 * MB


def test_a_peak_between_two_readings_is_seen_once(host: Host) -> None:
    probe = HostProbe(host.root)
    assert probe.read().used_bytes == 100 * MB
    host.set_process(resident=200, peak=900, files=50)
    assert probe.read().used_bytes == 850 * MB
    assert probe.read().used_bytes == 150 * MB


def test_this_process_is_read_and_grows() -> None:
    probe = HostProbe()
    before = probe.read()
    assert 0 < before.used_bytes < before.limit_bytes
    held = torch.ones(64 * MB // 4)
    assert probe.read().used_bytes >= before.used_bytes + 0.9 * held.nbytes


def test_a_system_without_proc_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="status"):
        HostProbe(tmp_path)


def test_peaks_are_those_between_readings_and_each_probe_has_its_own() -> None:
    first, second = HostProbe(), HostProbe()
    before = first.read().used_bytes
    second.read()
    with mmap.mmap(-1, 64 * MB) as block:  # a tensor might get what the C library has kept
        for _ in range(64):
            block.write(b"1" * MB)
        with_block = first.read().used_bytes
    assert with_block >= before + 60 * MB
    assert first.read().used_bytes >= with_block - 4 * MB  # the block was there at the beginning of this time
    assert first.read().used_bytes < with_block - 50 * MB
    assert second.read().used_bytes >= with_block - 4 * MB  # though the first one has reset the kernel's peak


def test_where_the_peak_cannot_be_reset_it_is_that_of_the_whole_life(host: Host) -> None:
    refused = host.root / "proc/self/clear_refs"
    refused.mkdir()
    probe = HostProbe(host.root)
    host.set_process(resident=150, peak=900)
    assert probe.read().used_bytes == 900 * MB
    assert probe.read().used_bytes == 150 * MB


def test_a_limit_holds_for_a_second(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_probe, "_LIMIT_AGE_S", 1.0)
    now = 10.0
    monkeypatch.setattr(host_probe.time, "monotonic", lambda: now)
    probe = HostProbe(host.root)
    assert probe.read() == MemoryReading(100 * MB, 4100 * MB)
    host.write("/proc/meminfo", "MemAvailable: 0 kB\n")
    now = 10.9
    assert probe.read().limit_bytes == 4100 * MB
    now = 11.0
    assert probe.read().limit_bytes == 100 * MB
