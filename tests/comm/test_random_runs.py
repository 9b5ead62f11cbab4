"""The invariant: whatever the codec, topology, sizes, buckets and timing, nothing is lost and nobody hangs.

`python -m tests.comm.soak_random_runs --runs 1000` runs many more of these.
"""

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hpc.comm import exchanges, hook, layout
from lightning_hpc.comm.codecs import CODEC_NAMES, Codec, make_codec
from lightning_hpc.comm.exchanges import FeedbackSettings
from lightning_hpc.comm.hook import GradientReducer
from lightning_hpc.comm.layout import ParameterSpec
from lightning_hpc.comm.pipeline import ThreadPipeline
from tests.comm.exchanges.engine import SignCodec, same_on_all_ranks, summed
from tests.comm.test_allreduce import _random_topology
from tests.helpers import run_ranks

SHAPES = ((), (1,), (7,), (0, 4), (300,), (3, 5), (64, 33), (40, 129), (5001,))


class Delayed:
    """A stage that starts late now and then, and may fail once; no result depends on the delay.

    Args:
        stage: The stage.
        rng: Draws the delays.
        chance: How often it is late.
        failures: Calls of `start` and `finish`, counted together, before one raises.
    """

    def __init__(self, stage: Any, rng: random.Random, chance: float, failures: list[int]) -> None:
        self.stage, self.rng, self.chance, self.failures = stage, rng, chance, failures
        self.ranks, self.depth = stage.ranks, stage.depth

    def __str__(self) -> str:
        return str(self.stage)

    def start(self, item: Any) -> Any:
        self._perturb()
        return self.stage.start(item)

    def finish(self, item: Any) -> None:
        self._perturb()
        self.stage.finish(item)

    def _perturb(self) -> None:
        if self.rng.random() < self.chance:
            time.sleep(self.rng.random() * 2e-3)
        if self.failures:
            self.failures[0] -= 1
            if self.failures[0] < 0:
                raise RuntimeError("planted")


class RandomRun:
    """One run; all ranks draw the same but for the delays.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        seed: Decides everything.
        failing: Rank, stage and call at which an exception is planted.
    """

    def __init__(self, rank: int, world_size: int, seed: int, failing: tuple[int, int, int] | None = None) -> None:
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.rng = rng = random.Random(seed)
        self.topology = _random_topology(rng, world_size)
        self.shapes = {f"layer.{index}": rng.choice(SHAPES) for index in range(rng.randint(1, 6))}
        if failing is not None:
            self.shapes["layer.never.empty"] = (300,)  # or no stage has anything to do
        self.specs = {
            name: ParameterSpec(name, torch.Size(shape).numel(), shape[0] if shape else 1)
            for name, shape in self.shapes.items()
        }
        self.codecs = rng.sample(["none", *CODEC_NAMES, SignCodec.name], rng.randint(1, 2))
        self.dtype = rng.choice([torch.float32, torch.float32, torch.float32, torch.bfloat16])
        layout._PIECE_NUMEL = rng.choice([256, 1000, 2**18])
        exchanges._MIN_SPARSE_NUMEL = rng.choice([1, 300, 2**12])
        slice_bytes, chance = rng.choice([400, 4000, 1 << 20]), rng.choice([0.0, 0.05, 0.5])
        own = random.Random(f"{seed} {rank}")
        place = failing if failing is not None and failing[0] == rank else None

        def pipeline(stages: Any, *args: Any) -> ThreadPipeline:
            failures = [[place[2]] if place and place[1] % len(stages) == index else [] for index in range(len(stages))]
            return ThreadPipeline([Delayed(stage, own, chance, f) for stage, f in zip(stages, failures, strict=True)])

        hook._make_thread_pipeline = pipeline
        self.reducer = GradientReducer(
            self.topology,
            device=torch.device("cpu"),
            slice_bytes=slice_bytes,
            timeout=None,
            stats=hook.CommStats(),
            parameters={name: torch.empty(shape) for name, shape in self.shapes.items()},
            codecs=[_make_codec(name) for name in self.codecs if name != "none"],
            feedback=FeedbackSettings(is_used=rng.random() < 0.9, spares_idle=rng.random() < 0.5),
        )

    def step(self, number: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """One backward pass; returns what arrived, and the true mean in fp64."""
        if number == 0 or self.rng.random() < 0.3:
            self.reducer.use(self.rng.choice(self.codecs))
        names = self.rng.sample(list(self.specs), len(self.specs))
        cuts = sorted(self.rng.choices(range(len(names) + 1), k=self.rng.randint(0, 3)))
        buckets = [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]
        given = [self._gradients(rank, number) for rank in range(self.world_size)]
        if self.rng.random() < 0.2:
            victim, name = self.rng.randrange(self.world_size), self.rng.choice(names)
            given[victim][name][-1:] = self.rng.choice([float("nan"), float("inf")])
        flat = [torch.cat([torch.zeros(0, dtype=self.dtype), *(given[self.rank][n] for n in b)]) for b in buckets]
        futures = [
            self.reducer(tensor, index == len(buckets) - 1, [self.specs[name] for name in buckets[index]])
            for index, tensor in enumerate(flat)
        ]
        arrived: dict[str, Tensor] = {}
        for bucket, future in zip(buckets, futures, strict=True):
            parts = future.wait().split([self.specs[name].numel for name in bucket]) if bucket else ()
            arrived.update(zip(bucket, parts, strict=True))
        true = {name: torch.stack([one[name].double() for one in given]).mean(0) for name in self.specs}
        return arrived, true

    def kept(self, name: str) -> Tensor:
        """What all ranks hold back of a parameter; a collective."""
        total = torch.zeros(self.specs[name].numel, dtype=torch.float64)
        for state in self.reducer.state_dict().values():
            for kind, residuals in state.items():
                if kind.startswith("residuals"):
                    for key, value in residuals.items():
                        start, _, of = key.partition(":")
                        if of == name:
                            total[int(start) : int(start) + value.numel()] += value
        return summed(total)

    def check(self) -> None:
        """Runs it.

        Raises:
            AssertionError: If ranks differ, or something is lost.
        """
        missing = {name: torch.zeros(spec.numel, dtype=torch.float64) for name, spec in self.specs.items()}
        size = dict(missing)
        for number in range(self.rng.randint(1, 5)):
            arrived, true = self.step(number)
            for name in self.specs:
                assert same_on_all_ranks(arrived[name].nan_to_num(7.0)), (self.seed, number, name)
                assert torch.equal(arrived[name].isfinite(), true[name].isfinite()), (self.seed, number, name)
                missing[name] = missing[name] + (arrived[name].double() - true[name]).nan_to_num(0.0, 0.0, 0.0)
                size[name] = size[name] + true[name].nan_to_num(0.0, 0.0, 0.0).abs()
        rounding = 1e-5 if self.dtype == torch.float32 else 0.05
        if self.reducer.state_dict() and not self._feeds_back():
            return
        for name in self.specs:
            if missing[name].numel():
                off, scale = (missing[name] + self.kept(name)).abs().max(), size[name].max()
                assert off <= rounding * (scale + 1), (self.seed, name, off, scale)

    def close(self) -> None:
        self.reducer.close()

    def _feeds_back(self) -> bool:
        return all(exchange._feedback is not None for exchange in self.reducer._exchanges.values())

    def _gradients(self, rank: int, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1000 + 10 * number + rank)
        return {name: torch.randn(spec.numel, generator=generator).to(self.dtype) for name, spec in self.specs.items()}


def _make_codec(name: str) -> Codec:
    return SignCodec() if name == SignCodec.name else make_codec(name)


def run_many(rank: int, world_size: int, first: int, count: int) -> None:
    """Random runs with the seeds ``first`` and following."""
    for seed in range(first, first + count):
        run = RandomRun(rank, world_size, seed)
        run.check()
        dist.barrier()
        run.close()


def run_until_it_fails(rank: int, world_size: int, seed: int) -> str:
    """A random run where one stage of one rank raises; returns this rank's error."""
    rng = random.Random(seed)
    failing = (rng.randrange(world_size), rng.randrange(12), rng.randrange(10))
    run = RandomRun(rank, world_size, seed, failing)
    try:
        for number in range(100):
            run.step(number)
    except RuntimeError as error:
        return str(error)
    finally:
        run.close()
    return ""


def assert_all_failed(errors: list[str]) -> None:
    assert sum("planted" in error for error in errors) >= 1, errors
    for error in errors:
        assert "level" in error or "closed" in error, errors  # every rank learns of it, and is told where


@pytest.mark.parametrize(("world_size", "runs"), [(2, 25), (3, 25), (4, 25), (5, 15)])
def test_nothing_is_lost_over_random_codecs_topologies_buckets_and_delays(world_size: int, runs: int) -> None:
    run_ranks(run_many, world_size, 10_000 * world_size, runs, timeout=120)


@pytest.mark.parametrize("seed", range(3))
def test_an_error_anywhere_ends_all_ranks_with_an_error(seed: int) -> None:
    assert_all_failed(run_ranks(run_until_it_fails, 2 + seed, 77_000 + seed, timeout=60))
