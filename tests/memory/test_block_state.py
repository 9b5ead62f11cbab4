import pytest
import torch
from torch import Tensor, nn

from lightning_hpc.memory.block_state import BlockState, may_change


class Holder(nn.Module):
    written: Tensor
    replaced: Tensor
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("written", "replaced", "kept"):
            self.register_buffer(name, torch.zeros(2))
        self.register_buffer("absent", None)
        self.count = 0

    def change(self) -> None:
        self.written.add_(1)
        self.replaced = self.replaced + 1
        self.count += 1
        self.added = "new"

    def look(self) -> tuple[float, float, int, bool]:
        return float(self.written[0]), float(self.replaced[0]), self.count, hasattr(self, "added")


def test_what_was_there_comes_back_and_goes_again() -> None:
    holder, other = Holder(), Holder()
    state = BlockState([holder, other])
    buffers = dict(holder.named_buffers())
    holder.change()
    assert state.find_changes() == {holder}
    for _ in range(2):  # what happens inside is forgotten
        with state.restored():
            assert holder.look() == (0, 0, 0, False)
            holder.change()
        assert holder.look() == (1, 1, 1, True)
    assert holder.written is buffers["written"]
    assert holder.kept is buffers["kept"]


def test_it_goes_again_after_an_error() -> None:
    holder = Holder()
    state = BlockState([holder])
    holder.change()
    state.find_changes()
    with pytest.raises(ArithmeticError), state.restored():
        raise ArithmeticError
    assert holder.look() == (1, 1, 1, True)


def test_running_statistics_are_restored_though_their_versions_do_not_change() -> None:
    norm = nn.BatchNorm1d(3)
    assert norm.running_mean is not None
    state = BlockState([norm])
    norm(torch.ones(2, 3))
    assert state.find_changes() == {norm}
    with state.restored():
        assert torch.equal(norm.running_mean, torch.zeros(3))
    assert not torch.equal(norm.running_mean, torch.zeros(3))


def test_only_norms_with_running_statistics_change_unseen() -> None:
    assert may_change(nn.BatchNorm2d(1))
    assert may_change(nn.SyncBatchNorm(1))
    assert not may_change(nn.LayerNorm(1))
