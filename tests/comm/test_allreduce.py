"""The invariant: whatever the topology, slice size, dtype and timing, every rank ends with the same mean."""

import random
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hpc.comm import allreduce, hook
from lightning_hpc.comm.hook import GradientReducer
from lightning_hpc.comm.layout import ParameterSpec
from lightning_hpc.comm.pipeline import ThreadPipeline
from lightning_hpc.comm.stats import CommStats
from lightning_hpc.comm.topology import Topology
from tests.helpers import RanksFailedError, run_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
SIZES = (0, 1, 2, 3, 7, 1000, 4097)
# One unit in the last place of sums of a few normal numbers; what is summed in fp32 is rounded once or twice.
TOLERANCE = {
    torch.float32: 1e-6,
    torch.float64: 1e-14,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
    torch.complex64: 1e-6,
}


def make_reducer(
    topology: Topology, slice_bytes: int, stats: CommStats | None = None, timeout_s: float = 30
) -> GradientReducer:
    return GradientReducer(
        topology,
        device=torch.device("cpu"),
        slice_bytes=slice_bytes,
        timeout=timedelta(seconds=timeout_s),
        stats=stats or CommStats(),
    )


def inputs(world_size: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    real = torch.complex64 if dtype.is_complex else torch.float32
    return [torch.randn(numel, generator=generator, dtype=real).to(dtype) for _ in range(world_size)]


def mean(tensors: list[Tensor]) -> Tensor:
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    return torch.stack([tensor.to(wide) for tensor in tensors]).mean(0)


def _reduce_all_kinds(rank: int, world_size: int, domains: list) -> dict[str, Tensor]:
    reducer = make_reducer(Topology.from_lists(domains), slice_bytes=1000)
    results = {}
    for dtype in DTYPES:
        for numel in SIZES:
            tensors = inputs(world_size, numel, dtype)
            mine = tensors[rank].clone()
            assert reducer(mine, True).wait() is mine
            torch.testing.assert_close(
                mine.to(mean(tensors).dtype), mean(tensors), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )
            results[f"{dtype} {numel}"] = mine
    reducer.close()
    return results


@pytest.mark.parametrize(
    "domains",
    [
        [[0, 1], [2, 3]],
        [[0], [1]],
        [[2, 0], [3, 1]],
        [[0], [1, 2, 3]],
        [[0, 1, 2], [3, 4]],
        [[[0], [2, 3]], [[1], [4]]],
        [0, 1, 2],
    ],
    ids=str,
)
def test_mean_is_right_and_the_same_bits_on_all_ranks(domains: list) -> None:
    world_size = Topology.from_lists(domains).world_size
    first, *others = run_ranks(_reduce_all_kinds, world_size, domains)
    for other in others:
        for key, value in first.items():
            assert torch.equal(value, other[key]), key


def _fp16_extremes(rank: int, world_size: int) -> tuple[float, float]:
    reducer = make_reducer(Topology.from_lists([[0, 1], [2, 3]]), slice_bytes=1 << 20)
    large, small = torch.full((8,), 60000.0, dtype=torch.float16), torch.full((8,), 2.0**-24, dtype=torch.float16)
    reducer(large, False).wait()
    reducer(small, True).wait()
    reducer.close()
    return large[0].item(), small[0].item()


def test_fp16_neither_overflows_nor_underflows() -> None:
    # pytorch#59522: the sum of four would be inf, and a quarter of the smallest number would be zero.
    assert all(large == 60000 for large, _ in run_ranks(_fp16_extremes, 4))


def _non_finite(rank: int, world_size: int) -> Tensor:
    reducer = make_reducer(Topology.from_lists([[0, 1], [2, 3]]), slice_bytes=16)
    gradient = torch.ones(9)
    if rank == 2:
        gradient[4], gradient[5] = float("nan"), float("inf")
    reducer(gradient, True).wait()
    reducer.close()
    return gradient


def test_nan_and_inf_of_one_rank_reach_all_and_nothing_else() -> None:
    for gradient in run_ranks(_non_finite, 4):
        assert gradient[4].isnan()
        assert gradient[5].isinf()
        assert torch.equal(gradient[[0, 1, 2, 3, 6, 7, 8]], torch.ones(7))


def _count_bytes(rank: int, world_size: int, domains: list) -> dict[str, int]:
    stats = CommStats()
    reducer = make_reducer(Topology.from_lists(domains), 4096, stats)
    reducer(torch.ones(120_000), True).wait()
    reducer.close()
    return stats.bytes_sent


def test_bytes_between_nodes_meet_the_lower_bound() -> None:
    size = 120_000 * 4
    sent = run_ranks(_count_bytes, 4, [[0, 1], [2, 3]])
    assert sum(rank["inter_node"] for rank in sent) == 2 * size  # 2 (N-1)/N S for each of N = 2 nodes
    assert sum(rank["intra_node"] for rank in sent) == 2 * 2 * size  # (L-1) S up and as much down, in each node
    flat = run_ranks(_count_bytes, 4, [0, 1, 2, 3])
    assert flat == [{"all_ranks": 3 * size // 2}] * 4


def _random_topology(rng: random.Random, world_size: int) -> Topology:
    ranks = list(range(world_size))
    rng.shuffle(ranks)
    cuts = sorted(rng.sample(range(1, world_size), rng.randint(1, world_size - 1)))
    nodes: list[Any] = [ranks[a:b] for a, b in zip([0, *cuts], [*cuts, world_size], strict=True)]
    if len(nodes) > 2 and rng.random() < 0.4:
        middle = rng.randint(1, len(nodes) - 1)
        nodes = [nodes[:middle], nodes[middle:]]
    return Topology.from_lists(nodes)


class _Delayed:
    """A stage that starts late now and then, to perturb the order of events; no result depends on it."""

    def __init__(self, stage: Any, rng: random.Random, chance: float) -> None:
        self.stage, self.rng, self.chance = stage, rng, chance
        self.ranks, self.depth = stage.ranks, stage.depth

    def start(self, shards: Any) -> Any:
        if self.rng.random() < self.chance:
            time.sleep(self.rng.random() * 2e-3)
        return self.stage.start(shards)

    def finish(self, shards: Any) -> None:
        self.stage.finish(shards)


def _random_runs(rank: int, world_size: int, first: int, count: int) -> None:
    for seed in range(first, first + count):
        rng = random.Random(seed)  # the same draws on all ranks …
        topology = _random_topology(rng, world_size)
        slice_bytes = rng.choice([4, 64, 1000, 4096, 1 << 20])
        sizes = [rng.choice([1, 5, 300, 3001]) for _ in range(rng.randint(1, 6))]
        chance = rng.choice([0.0, 0.05, 0.5])
        own = random.Random(f"{seed} {rank}")  # … and delays of its own on each
        hook._make_thread_pipeline = lambda stages, own=own, chance=chance: ThreadPipeline(
            [_Delayed(stage, own, chance) for stage in stages]
        )
        reducer = make_reducer(topology, max(slice_bytes, max(sizes) * 4 // 50))
        tensors = [inputs(world_size, size, seed=seed + index) for index, size in enumerate(sizes)]
        futures = [reducer(ranks[rank].clone(), index == len(sizes) - 1) for index, ranks in enumerate(tensors)]
        for future, ranks in zip(futures, tensors, strict=True):
            torch.testing.assert_close(future.wait().double(), mean(ranks), rtol=1e-5, atol=1e-6)
        reducer.close()


@pytest.mark.parametrize(("world_size", "runs"), [(2, 40), (3, 40), (4, 60), (5, 60)])
def test_no_hang_over_random_topologies_sizes_and_delays(world_size: int, runs: int) -> None:
    run_ranks(_random_runs, world_size, 1000 * world_size, runs, timeout=120)


def _fail_on_rank_1(rank: int, world_size: int) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("planted")

    if rank == 1:
        allreduce.sum_rows = broken
    reducer = make_reducer(Topology.from_lists([[0, 1], [2, 3]]), slice_bytes=400)
    try:
        reducer(torch.ones(1000), True).wait()
    finally:
        reducer.close()


def test_an_error_on_one_rank_ends_all_ranks_and_names_the_level() -> None:
    # Rank 1 fails at once; its process ends, and its peers see their connection close instead of waiting for ever.
    with pytest.raises(RanksFailedError) as error:
        run_ranks(_fail_on_rank_1, 4, timeout=60)
    message = str(error.value)
    assert "reduce-scatter of level 'intra_node' on rank 1 of ranks [0, 1] failed in a bucket: planted" in message
    for rank in (0, 2, 3):
        assert f"rank {rank}: Traceback" in message
    assert "level 'inter_node' on rank 3 of ranks [1, 3] failed" in message
    assert "Rank 1 says: reduce-scatter of level 'intra_node' on rank 1 of ranks [0, 1] failed in a bucket" in message


def _stay_away(rank: int, world_size: int) -> None:
    reducer = make_reducer(Topology.from_lists([[0], [1], [2]]), slice_bytes=400, timeout_s=3)
    if rank == 2:
        dist.distributed_c10d._get_default_store().wait(["others have failed"])
        return
    try:
        reducer(torch.ones(1000), True, [ParameterSpec("weight", 1000, 10)]).wait()
    finally:
        if rank == 0:
            dist.distributed_c10d._get_default_store().set("others have failed", "")
        reducer.close()


def test_a_time_out_names_level_bucket_and_missing_ranks() -> None:
    with pytest.raises(RanksFailedError) as error:
        run_ranks(_stay_away, 3, timeout=60)
    assert "level 'inter_node' on rank 0 of ranks [0, 1, 2] failed in the bucket of weight" in str(error.value)
    assert "No word from ranks [2]" in str(error.value)
