import sys
from typing import Any

import pytest
import torch

from lightning_hpc.memory import cuda_pool
from lightning_hpc.memory.cuda_pool import CudaPool, use_expandable_segments, why_not_expandable, why_not_in_one_piece
from tests.memory.fake_cuda_memory import FakeCudaMemory

DEVICE = torch.device("cuda", 0)
HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeCudaMemory:
    fake = FakeCudaMemory(1000).install(monkeypatch)
    monkeypatch.setattr(cuda_pool.torch, "empty", lambda size, **kwargs: fake.take(size))
    for name in (*cuda_pool._SETTINGS, HOOK):
        monkeypatch.delenv(name, raising=False)
    return fake


def test_the_pool_gets_what_is_missing_in_one_piece(memory: FakeCudaMemory) -> None:
    memory.allocate(300)
    pool = CudaPool(DEVICE)
    assert pool.peak_bytes() == 300
    memory.allocate(400)
    memory.release(400)
    assert pool.peak_bytes() == 700
    assert pool.reserve(770) == 770
    assert (memory.allocated, memory.free) == (300, 230)
    assert pool.reserve(200) == 300  # more than that is in use


def test_a_device_that_is_too_full_says_so_and_keeps_nothing(memory: FakeCudaMemory) -> None:
    memory.allocate(300)
    memory.free -= 500  # another process
    with pytest.raises(torch.OutOfMemoryError):
        CudaPool(DEVICE).reserve(600)
    assert (memory.reserved, memory.free) == (300, 200)


@pytest.mark.parametrize(
    ("variables", "backend", "reason"),
    [
        ({}, "native", None),
        ({}, "cudaMallocAsync", "the allocator is cudaMallocAsync"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "native", "the environment decides"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "native", "the environment decides"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, "native", None),
        ({HOOK: "1"}, "native", "NCCL registers segments"),
        ({HOOK: "0"}, "native", None),
    ],
)
def test_what_stands_against_expandable_segments(
    memory: FakeCudaMemory, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], backend: str, reason: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    memory.backend = backend
    found = why_not_expandable()
    assert found is None if reason is None else found is not None and found.startswith(reason)


def test_other_systems_have_no_expandable_segments(memory: FakeCudaMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert why_not_expandable() == "PyTorch has them for CUDA on Linux only"


def test_what_stands_against_one_piece(memory: FakeCudaMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_in_one_piece() is None
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    assert "max_split_size_mb keeps large pieces whole" in str(why_not_in_one_piece())
    memory.backend = "cudaMallocAsync"
    assert "cudaMallocAsync" in str(why_not_in_one_piece())


def test_other_settings_of_the_environment_stay(memory: FakeCudaMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", given.append)
    use_expandable_segments()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    use_expandable_segments()
    assert given == ["expandable_segments:True", "max_split_size_mb:128,expandable_segments:True"]
