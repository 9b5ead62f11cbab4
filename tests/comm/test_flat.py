import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hpc.comm.flat import FlatAllReduce
from lightning_hpc.comm.hook import reduce_gradients
from lightning_hpc.comm.stats import CommStats
from lightning_hpc.comm.topology import Topology
from tests.comm.test_allreduce import make_reducer
from tests.helpers import run_ranks


class Shared(nn.Module):
    """The embedding's sparse gradient shares its memory with the gradient that goes on to the linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(6, 3, sparse=True), nn.Linear(2, 3)

    def forward(self, rank: int) -> Tensor:
        tokens = torch.tensor([rank, 3, 3] + [1] * 3 * rank)  # as many as differ between ranks, some twice
        return (self.embedding(tokens) + self.linear(tokens.float().unsqueeze(1) * torch.tensor([1.0, 0.5]))).exp()


def _gradients(rank: int, model: nn.Module) -> list[Tensor]:
    model(rank).sum().backward()
    return [parameter.grad.to_dense().clone() for parameter in model.parameters() if parameter.grad is not None]


def _with_hook(rank: int, world_size: int, domains: list) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    stats = CommStats()
    model = DistributedDataParallel(Shared(), bucket_cap_mb=1e-5)
    reducer = make_reducer(Topology.from_lists(domains), 16, stats)
    model.register_comm_hook(reducer, reduce_gradients)
    gradients = _gradients(rank, model)
    reducer.close()
    return gradients, stats.fallbacks["sparse"]


def test_sparse_gradients_take_the_exact_path_and_leave_dense_ones_alone() -> None:
    by_rank = []
    for rank in range(3):
        torch.manual_seed(0)
        by_rank.append(_gradients(rank, Shared()))
    expected = [torch.stack(parameter).mean(0) for parameter in zip(*by_rank, strict=True)]
    for domains in ([0, 1, 2], [[0, 1], [2]]):
        for gradients, fallbacks in run_ranks(_with_hook, 3, domains):
            assert fallbacks == 1
            for gradient, mean in zip(gradients, expected, strict=True):
                torch.testing.assert_close(gradient, mean)


def _same_bits(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    results = []
    for hook in (False, True):
        torch.manual_seed(0)
        linear = nn.Linear(50, 50)
        model = DistributedDataParallel(linear)
        if hook:
            assert dist.group.WORLD is not None
            flat = FlatAllReduce(dist.group.WORLD, CommStats())
            model.register_comm_hook(flat, lambda state, bucket: state(bucket.buffer()))
        model(torch.randn(4, 50, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
        assert linear.weight.grad is not None
        results.append(linear.weight.grad)
    return results[0], results[1]


def test_plain_path_has_the_bits_of_ddp() -> None:
    for ddp, flat in run_ranks(_same_bits, 3):
        assert torch.equal(ddp, flat)
