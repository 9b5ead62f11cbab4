"""Processors near a device are preferred only where they are known, allowed, enough, and not all."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hpc.data import locality
from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.locality import cpus_near, parse_cpus, running_on, stay_on
from lightning_hpc.data.mapping import PAGE, SharedMapping
from tests.data.datasets import Numbers

BUS = "0000:1b:00.0"
ALLOWED = frozenset({0, 1, 2, 3, 8, 9})


@pytest.fixture
def sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with one device, whose neighbours are not written down yet."""
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    cuda = SimpleNamespace(is_initialized=lambda: True, get_device_properties=lambda device: properties)
    monkeypatch.setattr(locality, "cuda", cuda)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(ALLOWED))
    (tmp_path / "bus/pci/devices" / BUS).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "workers", "expected"),
    [
        ("0-3\n", 4, {0, 1, 2, 3}),
        ("0,8-9\n", 2, {0, 8, 9}),
        ("0-3\n", 5, set()),  # too few
        ("0-4\n", 1, set()),  # not all of them are allowed
        ("0-3,8-9\n", 1, set()),  # no others are allowed
        ("\n", 0, set()),
    ],
)
def test_which_processors_are_preferred(text: str, workers: int, expected: set[int], sys: Path) -> None:
    (sys / "bus/pci/devices" / BUS / "local_cpulist").write_text(text)
    assert cpus_near("cuda", workers, sys) == expected


def test_none_where_nobody_says_or_cuda_is_not_in_use(sys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpus_near("cuda", 1, sys) == set()
    (sys / "bus/pci/devices" / BUS / "local_cpulist").write_text("0-3")
    assert cpus_near("cpu", 1, sys) == cpus_near(None, 1, sys) == set()
    monkeypatch.setattr(locality.cuda, "is_initialized", lambda: False)
    assert cpus_near("cuda", 1, sys) == set()


def test_lists_of_the_kernel() -> None:
    assert parse_cpus("0-2,7,9-9\n") == {0, 1, 2, 7, 9}


def test_a_thread_goes_back_to_all_processors_also_where_it_may_not_leave_them() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    with running_on(one):
        assert os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == before
    with running_on(frozenset()):
        assert os.sched_getaffinity(0) == before
    stay_on(frozenset({10**4}))
    assert os.sched_getaffinity(0) == before


def test_memory_is_taken_on_the_processors_it_is_to_be_near_to(monkeypatch: pytest.MonkeyPatch) -> None:
    one = frozenset({min(os.sched_getaffinity(0))})
    found: list[Any] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: found.append(os.sched_getaffinity(0)))
    SharedMapping(near=one).reserve(0, PAGE)
    assert found == [one]


def affinity(samples: Any) -> Any:
    return sorted(os.sched_getaffinity(0))


def test_workers_stay_near_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    near = max(os.sched_getaffinity(0))
    monkeypatch.setattr("lightning_hpc.data.loader.cpus_near", lambda device, workers: frozenset({near}))
    loader = SharedMemoryLoader(Numbers(4), 2, num_workers=1, collate_fn=affinity)
    assert list(loader) == [[near]] * 2
