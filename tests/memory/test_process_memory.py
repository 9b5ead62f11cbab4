import pytest

from lightning_hpc.memory.process_memory import ProcessMemory, parse_available

STATUS = """\
Name:\tpython
Umask:\t0022
State:\tR (running)
Groups:\t0 4 27
VmPeak:\t 9000000 kB
VmHWM:\t    5000 kB
VmRSS:\t    4000 kB
RssAnon:\t    2500 kB
RssFile:\t    1000 kB
RssShmem:\t     500 kB
Threads:\t12
"""


def test_pages_of_files_do_not_count() -> None:
    assert ProcessMemory.parse(STATUS) == ProcessMemory(used_bytes=3000 * 1024, peak_bytes=4000 * 1024)


def test_a_kernel_without_the_split_counts_all() -> None:
    assert ProcessMemory.parse("Name:\tpython\nVmRSS:\t4000 kB\n") == ProcessMemory(4000 * 1024, 4000 * 1024)


def test_a_status_without_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="no VmRSS"):
        ProcessMemory.parse("Name:\tkthreadd\n")


def test_what_the_machine_has_left() -> None:
    text = "MemTotal:       24684096 kB\nMemFree:        100 kB\nMemAvailable:   200 kB\nHugePages_Total:       0\n"
    assert parse_available(text) == 200 * 1024
    with pytest.raises(ValueError, match="no MemAvailable"):
        parse_available("MemTotal: 1 kB\n")
