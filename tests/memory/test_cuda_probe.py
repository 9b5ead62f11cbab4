import pytest
import torch

from lightning_hpc.memory import CudaProbe, MemoryReading
from lightning_hpc.memory.cuda_peak import CudaPeak
from tests.memory.fake_cuda_memory import FakeCudaMemory

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCudaMemory:
    return FakeCudaMemory(1000).install(monkeypatch)


def test_the_limit_is_what_is_free_and_what_is_reserved(gpu: FakeCudaMemory) -> None:
    gpu.free -= 100  # another process
    gpu.allocate(300)
    gpu.release(200)
    assert CudaProbe(DEVICE).read() == MemoryReading(300, 900)


def test_a_fraction_of_the_process_is_a_limit(gpu: FakeCudaMemory) -> None:
    gpu.fraction = 0.25
    assert CudaProbe(DEVICE).read().limit_bytes == 250


def test_a_full_device_has_a_reading(gpu: FakeCudaMemory) -> None:
    gpu.free = 0
    assert CudaProbe(DEVICE).read() == MemoryReading(0, 1)


def test_the_peak_counts_from_the_last_reading(gpu: FakeCudaMemory) -> None:
    probe = CudaProbe(DEVICE)
    gpu.allocate(500)
    gpu.release(400)
    assert [probe.read().used_bytes, probe.read().used_bytes] == [500, 100]


def test_readers_of_one_device_do_not_take_each_others_peaks(gpu: FakeCudaMemory) -> None:
    often, seldom, elsewhere = CudaPeak(DEVICE), CudaPeak(DEVICE), CudaPeak(torch.device("cuda", 1))
    seen = []
    for size in (500, 300, 400):
        gpu.allocate(size)
        gpu.release(size)
        seen.append(often.read())
    assert seen == [500, 300, 400]
    assert seldom.read() == 500
    assert [often.read(), seldom.read(), elsewhere.read()] == [0, 0, 0]


def test_a_device_without_index_is_the_current_one(gpu: FakeCudaMemory) -> None:
    probe, peak = CudaProbe(torch.device("cuda")), CudaPeak(torch.device("cuda", 1))
    gpu.allocate(500)
    assert probe.read().used_bytes == 500
    gpu.release(500)
    assert peak.read() == 500
