import pytest
import torch

from lightning_hpc.memory.freed_memory import _malloc_trim, give_back
from lightning_hpc.memory.host_probe import HostProbe


@pytest.mark.skipif(_malloc_trim() is None, reason="the C library keeps nothing that it could give back")
def test_the_process_shrinks_by_what_it_has_freed() -> None:
    probe = HostProbe()
    # Below the size from which the C library asks the system for each block by itself.
    tensors = [torch.ones(2000) for _ in range(20_000)]
    last = torch.ones(2000)  # keeps the end of the heap in use
    probe.read()
    full = probe.read().used_bytes
    del tensors
    give_back(torch.device("cpu"))
    probe.read()
    assert probe.read().used_bytes < full - 100 * 2**20
    assert last.sum() == 2000


def test_a_library_without_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hpc.memory.freed_memory._malloc_trim", lambda: None)
    give_back(torch.device("cpu"))
