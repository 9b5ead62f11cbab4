import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hpc.memory import SavedActivations
from lightning_hpc.memory.call_record import CallRecord

FLOAT = 4


def test_a_call_and_its_recomputation_are_noted_with_the_lives_of_what_they_save() -> None:
    layer, x = nn.Linear(3, 5), torch.ones(2, 3)
    calls = []

    class Owner:
        """Lives as long as the checkpoint."""

        def __call__(self, inputs: Tensor) -> Tensor:
            calls.append(self)
            with record.recomputation() if len(calls) > 1 else record.forward():
                return layer(inputs).exp()

    owner = Owner()
    with SavedActivations([*layer.parameters()]) as saved:
        record = CallRecord(saved, "block", torch.device("cpu"))
        record.hold_inputs([x], owner)
        loss = checkpoint(owner, x, use_reentrant=False).sum()
        assert not record.is_recomputed
        assert [holding.nbytes for holding in saved.holdings if holding.when == "plain"] == [6 * FLOAT, 10 * FLOAT]
        assert saved.live_bytes == 6 * FLOAT
        loss.backward()
        assert record.is_recomputed
        calls.clear()
        del owner, loss
    assert saved.live_bytes == 0
    assert saved.peak_bytes == (6 + 10) * FLOAT
    assert all(holding.end is not None for holding in saved.holdings)
    assert record.seconds() > 0
