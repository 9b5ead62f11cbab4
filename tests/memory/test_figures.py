from types import SimpleNamespace

import pytest
import torch

from lightning_hpc.memory.figures import MemoryFigures
from tests.memory.fake_cuda_memory import FakeCudaMemory
from tests.memory.fake_nvml import FakeNvml

UUID = "5f3c1a7e-0000-1111-2222-333344445555"
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCudaMemory:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    return FakeCudaMemory(1000).install(monkeypatch)


def test_a_gpu_has_all_figures(gpu: FakeCudaMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(f"GPU-{UUID}").install(monkeypatch)
    gpu.counters = {"allocation.all.allocated": 5000, "num_device_alloc": 50, "num_alloc_retries": 2}
    figures = MemoryFigures(DEVICE)
    # What comes before does not count.
    gpu.counters = {"allocation.all.allocated": 5100, "num_device_alloc": 60, "num_alloc_retries": 3}
    gpu.allocate(400)
    gpu.release(300)
    gpu.inactive_split = 100
    assert figures.read() == {
        "memory_used_bytes": 400,
        "memory_limit_bytes": 1000,
        "memory_reserved_bytes": 400,
        "memory_hit_rate": pytest.approx(0.9),
        "memory_fragmentation": 0.25,
        "memory_retries": 1,
        "gpu_used_bytes": 700,
        "gpu_utilization": 0.4,
    }
    again = figures.read()
    assert (again["memory_used_bytes"], again["memory_hit_rate"], again["memory_retries"]) == (100, None, 1)
    assert set(gpu.devices) == {DEVICE}
    figures.close()
    assert nvml.users == 0


def test_another_allocator_and_no_nvml_leave_gaps(gpu: FakeCudaMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml("", has_driver=False).install(monkeypatch)
    gpu.backend = "cudaMallocAsync"
    known = {key for key, value in MemoryFigures(DEVICE).read().items() if value is not None}
    assert known == {"memory_used_bytes", "memory_limit_bytes"}


def test_the_host_has_no_allocator_and_no_gpu() -> None:
    figures = MemoryFigures(torch.device("cpu"))
    known = {key for key, value in figures.read().items() if value is not None}
    assert known == {"memory_used_bytes", "memory_limit_bytes"}
    figures.close()


def test_a_device_that_nobody_knows_has_no_figures() -> None:
    assert set(MemoryFigures(torch.device("mps")).read().values()) == {None}
