"""The invariants: all ranks change together, and a change loses nothing of what a codec had kept."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_hpc.comm.codec_cost import measure_codec
from lightning_hpc.comm.codecs import make_codec
from lightning_hpc.comm.hook import GradientReducer
from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.policy import CodecPolicy, Order
from lightning_hpc.comm.stats import CommStats
from lightning_hpc.comm.topology import Topology
from lightning_hpc.comm.tuner import CodecTuner
from tests.helpers import run_ranks

CPU = torch.device("cpu")
SHAPES = {"a": (70, 300), "b": (300,), "c": (5000,)}
CODECS = ("int8", "int4", "lowrank")


class Scripted(CodecPolicy):
    """Orders each codec in turn, and ends with an exact choice."""

    def start(self) -> Order:
        self.script = ["int8", "int4", "lowrank", "ddp", "int4", "none"]
        return self._next()

    def next(self, seconds: Sequence[float]) -> Order:
        assert seconds
        return self._next()

    def _next(self) -> Order:
        self._kept = len(self.script) == 1
        self._current = self.script.pop(0)
        return Order(self._current, 3)


def make_tuner(topology: Topology, stats: CommStats, lines: list[str]) -> tuple[CodecTuner, GradientReducer]:
    codecs = [make_codec(name) for name in CODECS]
    reducer = GradientReducer(
        topology,
        device=CPU,
        slice_bytes=40_000,
        timeout=timedelta(seconds=30),
        stats=stats,
        parameters={name: torch.zeros(shape) for name, shape in SHAPES.items()},
        codecs=codecs,
    )
    tuner = CodecTuner(
        reducer,
        topology=topology,
        costs=[measure_codec(codec, list(reducer.specs.values()), CPU) for codec in codecs],
        slice_numel=10_000,
        group=dist.group.WORLD,
        device=CPU,
        stats=stats,
        announce=lines.append,
    )
    return tuner, reducer


def _train(rank: int, world_size: int, scripted: bool) -> dict[str, Any]:
    if scripted:
        from lightning_hpc.comm import tuner as module

        module.CodecPolicy = Scripted  # type: ignore[misc]
    links = [LinkSpeed(1e-5, 1e9), LinkSpeed(1e-4, 1e8)]
    stats, lines = CommStats(), []
    tuner, reducer = make_tuner(Topology.from_lists([[0, 1], [2, 3]], links), stats, lines)
    bucket = list(reducer.specs.values())
    numel = sum(spec.numel for spec in bucket)
    used, delivered, true = [], torch.zeros(numel), torch.zeros(numel)
    for step in range(21 if scripted else 60):
        gradients = torch.randn(world_size, numel, generator=torch.Generator().manual_seed(step))
        mine = gradients[rank].clone()
        reducer(mine, True, bucket).wait()
        stats.steps += 1
        delivered += mine
        true += gradients.mean(0)
        used.append(reducer._codec)
        tuner.finish_step()
    reducer.close()
    return {"used": used, "delivered": delivered, "true": true, "decisions": stats.decisions, "lines": lines}


def test_ranks_change_together_and_nothing_is_lost() -> None:
    first, *others = run_ranks(_train, 4, True)
    assert first["used"][:4] == ["int4"] * 4  # observed, with the fewest bytes
    assert first["used"][5::3] == ["int8", "int4", "lowrank", "ddp", "int4", "none"]
    for other in others:
        assert other["used"] == first["used"]
        assert torch.equal(other["delivered"], first["delivered"])
    torch.testing.assert_close(first["delivered"], first["true"], rtol=1e-4, atol=1e-4)
    assert [decision.choice for decision in first["decisions"]] == ["none"]
    assert len(first["lines"]) == 1
    assert not any(other["decisions"] for other in others)


def test_a_real_policy_settles_on_one_choice_everywhere() -> None:
    first, *others = run_ranks(_train, 4, False)
    assert all(other["used"] == first["used"] for other in others)
    (decision, *_) = first["decisions"]
    assert decision.choice in ("ddp", "none", *CODECS)
    assert set(decision.predicted) == {"ddp", "none", *CODECS}
    assert decision.choice in decision.measured
    assert decision.reason in first["lines"]
