"""The device side of the loader on a real CUDA device."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hpc.data.datamodule import SharedMemoryDataModule
from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.mapping import PAGE, SharedMapping
from lightning_hpc.data.page_lock import PageLock
from tests.data.datasets import Growing, Nested, Numbers
from tests.data.modules import Drawn, Remembers, fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Lightning's own, of few workers.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

WIDTH = 2**18  # a sample is 1 MiB
CUDA = torch.device("cuda")


def keep_busy(milliseconds: int = 5) -> None:
    """Lets the current stream fall behind."""
    torch.cuda._sleep(milliseconds * 10**6)


def sums(loader: Any) -> list[float]:
    """The mean of each batch, read late; the CPU asks for the next ones meanwhile, and forgets each at once."""
    found = []
    for batch in loader:
        keep_busy()
        found.append(batch.double().mean())
        del batch
    return [float(each) for each in found]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("depth", [1, 3])
def test_every_batch_arrives_while_slots_are_used_again(num_workers: int, depth: int) -> None:
    loader: SharedMemoryLoader[Any] = SharedMemoryLoader(
        Numbers(80, WIDTH), 2, num_workers=num_workers, device="cuda", device_prefetch=depth
    )
    for _ in range(3):
        assert sums(loader) == [2 * number + 0.5 for number in range(40)]
    loader.close()


def test_slots_that_grow_are_locked_anew() -> None:
    sizes = [1, 50, 2, 4000, 1, 9000, 3, 20000, 5]
    loader: SharedMemoryLoader[Any] = SharedMemoryLoader(Growing(sizes), 1, num_workers=2, device="cuda")
    for _ in range(2):
        for number, batch in enumerate(loader):
            assert batch["rows"].shape == (1, sizes[number], 100)
            assert batch["rows"].unique().tolist() == [number]


def test_all_nestings_arrive() -> None:
    for ours, theirs in zip(
        SharedMemoryLoader(Nested(9), 2, num_workers=1, device="cuda"), SharedMemoryLoader(Nested(9), 2), strict=True
    ):
        assert ours["large"].device.type == "cuda"
        assert torch.equal(ours["large"].cpu(), theirs["large"])
        assert torch.equal(ours["point"].y[0].cpu(), theirs["point"].y[0])
        assert ours["list"][2] == theirs["list"][2]


def test_ranges_are_page_locked_until_they_are_unlocked() -> None:
    mapping = SharedMapping()
    mapping.reserve(PAGE, 4 * PAGE)
    lock = PageLock(mapping, CUDA)
    memory = mapping.as_tensor()[PAGE : 5 * PAGE]
    assert not memory.is_pinned()
    lock.lock(PAGE, 4 * PAGE)
    assert memory.is_pinned()
    assert memory[100:].pin_memory().data_ptr() == memory[100:].data_ptr()  # pin_memory=True copies nothing
    lock.unlock(PAGE)
    assert not memory.is_pinned()
    lock.lock(PAGE, 2 * PAGE)
    del lock
    assert not memory.is_pinned()


def test_a_refusal_leaves_no_error_behind() -> None:
    lock = PageLock(SharedMapping(), CUDA)
    with pytest.warns(RuntimeWarning, match="cannot page-lock"):
        lock.lock(0, 0)  # CUDA takes no empty range
    assert float(torch.ones(3, device=CUDA).add(1).sum()) == 6
    torch.cuda.synchronize()


def test_a_worker_that_starts_after_page_locking_writes_to_locked_slots() -> None:
    loader: SharedMemoryLoader[Any] = SharedMemoryLoader(Numbers(80, WIDTH), 2, num_workers=1, device="cuda")
    iterator: Iterator[Tensor] = iter(loader)
    found = [float(next(iterator).double().mean()) for _ in range(5)]
    assert loader._stream is not None
    for pid in loader._stream.pids:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="was replaced; no sample is lost"):
        found += sums(iterator)
    assert found == [2 * number + 0.5 for number in range(40)]


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(()))

    def forward(self, batch: Tensor) -> Tensor:
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        keep_busy(1)
        return batch * 1 + self.one


def test_a_transform_runs_on_the_stream_of_the_copies() -> None:
    transform = Adds()
    loader: SharedMemoryLoader[Any] = SharedMemoryLoader(
        Numbers(80, WIDTH), 2, num_workers=1, device="cuda", device_transform=transform
    )
    for _ in range(2):
        assert sums(loader) == [2 * number + 1.5 for number in range(40)]
    assert transform.one.device.type == "cuda"


def test_the_cpu_waits_for_nothing() -> None:
    loader: SharedMemoryLoader[Any] = SharedMemoryLoader(Numbers(80, WIDTH), 2, num_workers=1, device="cuda")
    sums(loader)  # all slots and device memory are there
    torch.cuda.synchronize()
    iterator = iter(loader)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            keep_busy()
            next(iterator)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_lightning_trains_on_batches_that_are_there() -> None:
    class Watches(Remembers):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            assert batch[0].device == self.device
            return batch

    def make(**kwargs: Any) -> SharedMemoryDataModule:
        return SharedMemoryDataModule(Drawn(31), Drawn(5), batch_size=4, num_workers=1, **kwargs)

    settings: dict[str, Any] = {"accelerator": "gpu", "max_epochs": 2}
    ahead, _ = fit(make(), model=Watches(), **settings)
    plain, _ = fit(make(device_prefetch=0), **settings)
    assert ahead.seen == plain.seen
