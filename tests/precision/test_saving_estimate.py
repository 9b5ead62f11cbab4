import torch
from torch import nn

from lightning_hpc.precision.saving_estimate import SavingEstimate
from lightning_hpc.precision.unit_bytes import UnitBytes

MIB = 2**20
UNITS = {
    "first": UnitBytes(8 * MIB, 4 * MIB, MIB // 4),
    "second": UnitBytes(16 * MIB, 10 * MIB, MIB // 4, is_measured=True),
    "third": UnitBytes(2 * MIB, 2 * MIB, MIB // 4),
}


def estimate(model: nn.Module, low: list[str], steps: int = 0) -> SavingEstimate:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
    return SavingEstimate.of(model, [optimizer], UNITS, low, blocks=["first", "second"])


def test_what_each_remedy_would_save() -> None:
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB
    found = estimate(model, low=[])
    assert found.activations == 26 * MIB
    assert found.low_precision == 10 * MIB
    # The input of each block stays, 1 MiB, and the larger of them is there when it is recomputed.
    assert found.checkpointing == 24 * MIB - 2 * MIB - 16 * MIB
    assert found.states == 4 * 4 * MIB
    found = estimate(model, low=["second"])
    assert (found.activations, found.low_precision) == (20 * MIB, 4 * MIB)


def test_the_state_that_there_is_counts_and_frozen_parameters_have_none() -> None:
    model = nn.Linear(1024, 1024, bias=False)
    assert estimate(model, [], steps=1).states == 4 * 4 * MIB + 4  # and AdamW's counter of steps
    model.weight.requires_grad_(False)
    assert estimate(model, []).states == 4 * MIB


def test_advice_is_in_order_and_has_figures() -> None:
    lines = SavingEstimate(4 * 2**30, 3 * MIB, 5 * MIB, 16 * 2**30).advice().splitlines()
    assert lines[0] == "In this order, try:"
    assert lines[1].endswith("half of it saves about 2.0 GiB of activations")
    assert lines[2].endswith("3.0 MiB")
    assert lines[3].startswith("  3. accumulate_grad_batches=2")
    assert lines[4].endswith("up to 5.0 MiB")
    assert lines[5].endswith("over 8 devices 14.0 GiB")
