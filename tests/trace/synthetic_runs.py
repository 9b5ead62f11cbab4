"""A law for the records of a run, with a bottleneck of a given share planted in it.

Each rank has a clock. A step of a rank is data, transfer, forward and backward; then all wait for the last and for the
network; then optimizer and callbacks; then all exchange a flag. The law knows nothing of the rules that judge its
records.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lightning_hpc.trace import Trace

PHASES = ("data_prep", "h2d", "schedule", "forward", "backward", "comm", "optimizer")
SHAPES = {
    "data": ("constant", "every", "exponential", "transfer", "epochs"),
    "compute": ("ramp", "throttle", "spikes", "optimizer"),
    "memory": ("retries", "oom"),
    "communication": ("constant", "exponential"),
    "framework": ("constant", "every", "between"),
}
"""How the bottleneck of a dimension may look."""


@dataclass(frozen=True)
class Job:
    """A job without a bottleneck.

    Attributes:
        step_ms: Milliseconds of a step.
        parts: Shares of the phases, in the order of `PHASES`; they add up to 1.
        ranks: Number of ranks.
        accumulate: Batches of an optimizer step.
        epoch: Batches of an epoch.
    """

    step_ms: float
    parts: tuple[float, ...]
    ranks: int = 1
    accumulate: int = 1
    epoch: int = 1000


JOBS = {
    "1 ms": Job(1, (0.03, 0.01, 0.06, 0.30, 0.48, 0, 0.12)),
    "10 ms": Job(10, (0.02, 0.01, 0.03, 0.33, 0.53, 0, 0.08)),
    "50 ms": Job(50, (0.01, 0.03, 0.02, 0.28, 0.60, 0, 0.06)),
    "500 ms": Job(500, (0.005, 0.005, 0.005, 0.32, 0.64, 0, 0.025)),
    "Adam, short epochs": Job(20, (0.02, 0.01, 0.03, 0.30, 0.46, 0, 0.18), epoch=8),
    "accumulating": Job(30, (0.02, 0.01, 0.03, 0.34, 0.54, 0, 0.06), accumulate=4),
    "2 ranks": Job(40, (0.02, 0.01, 0.03, 0.30, 0.53, 0.05, 0.06), ranks=2),
    "4 ranks": Job(80, (0.01, 0.02, 0.02, 0.30, 0.55, 0.04, 0.06), ranks=4),
    "8 ranks": Job(200, (0.01, 0.01, 0.01, 0.32, 0.57, 0.03, 0.05), ranks=8),
}


@dataclass(frozen=True)
class Slow:
    """One rank that is slow.

    Attributes:
        rank: Which.
        phase: One of `PHASES`, ``compute`` for forward, backward and optimizer alike, or ``callback`` for a hook before
            the batch.
        share: What it adds to a step of the job, as a part of it.
        every: It is slow in each n-th step only, and so much more.
    """

    rank: int
    phase: str
    share: float
    every: int = 1


@dataclass
class _Run:
    job: Job
    steps: int
    rng: np.random.Generator
    own: dict[str, np.ndarray] = field(default_factory=dict)  # by phase, (ranks, steps)
    between: np.ndarray = field(default_factory=lambda: np.zeros(0))
    loader: np.ndarray = field(default_factory=lambda: np.zeros(0))
    memory: list[dict[str, Any]] = field(default_factory=list)


def simulate(
    job: Job,
    seed: int,
    *,
    steps: int = 20,
    dimension: str | None = None,
    shape: str = "constant",
    share: float = 0.0,
    slow: tuple[Slow, ...] = (),
    variation: float | None = None,
    with_comm: bool = True,
) -> list[Trace]:
    """The records of a run.

    Args:
        job: What is trained.
        seed: Of the noise.
        steps: Batches.
        dimension: Where the bottleneck is, on all ranks; None for nowhere.
        shape: One of `SHAPES` of the dimension.
        share: Part of the time that it takes.
        slow: Slow ranks.
        variation: Standard deviation of a phase's duration as a part of it; None draws 0.02 to 0.12.
        with_comm: Whether communication is measured; otherwise backward contains it.
    """
    rng = np.random.default_rng(seed)
    variation = rng.uniform(0.02, 0.12) if variation is None else variation
    run = _Run(job, steps, rng)
    epochs = -(-steps // job.epoch)
    run.between, run.loader = np.zeros(epochs), np.full(epochs, 0.02 * job.step_ms)
    for phase, part in zip(PHASES, job.parts, strict=True):
        # One link for all ranks, but work of its own on each.
        noise = _noise(rng, (1 if phase == "comm" else job.ranks, steps), variation)
        run.own[phase] = np.broadcast_to(part * job.step_ms * noise, (job.ranks, steps)).copy()
    updates = (np.arange(steps) + 1) % job.accumulate == 0
    run.own["optimizer"] *= updates * job.accumulate
    run.own["comm"] *= updates * job.accumulate
    # The first step allocates, and some steps of any machine are disturbed.
    run.own["forward"][:, 0] *= rng.uniform(2, 20)
    disturbed = rng.random((job.ranks, steps)) < 0.01
    run.own["forward"][disturbed] *= rng.uniform(1.5, 3)
    run.memory = [{} for _ in range(steps)]
    if dimension is not None:
        _plant(run, dimension, shape, share / (1 - share) * job.step_ms)
    for each in slow:
        _slow_down(run, each)
    return _record(run, updates, with_comm=with_comm)


def _noise(rng: np.random.Generator, shape: tuple[int, int], variation: float) -> np.ndarray:
    """Lognormal with a mean of one; half of its variance lasts for a few steps."""
    fresh = rng.normal(size=shape)
    slow = np.zeros(shape)
    slow[:, 0] = rng.normal(size=shape[0])
    for step in range(1, shape[1]):
        slow[:, step] = 0.7 * slow[:, step - 1] + np.sqrt(1 - 0.49) * rng.normal(size=shape[0])
    return np.asarray(np.exp(variation * (fresh + slow) / np.sqrt(2) - variation**2 / 2))


def _plant(run: _Run, dimension: str, shape: str, mean_ms: float) -> None:
    rng, steps = run.rng, run.steps
    every = int(rng.integers(3, 6))
    bursts = np.where(np.arange(steps) % every == rng.integers(every), float(every), 0.0)
    by_shape = {
        "every": bursts,
        "spikes": bursts,
        "retries": bursts,
        "oom": bursts,
        "exponential": rng.exponential(size=steps),
        "ramp": 2 * np.arange(steps) / steps,
        "throttle": 2.0 * (np.arange(steps) >= steps // 2),
    }
    times = mean_ms * by_shape.get(shape, np.ones(steps)) * _noise(rng, (1, steps), 0.05)[0]
    if shape == "epochs":
        run.loader += mean_ms * run.job.epoch
    elif shape == "between":
        run.between += mean_ms * run.job.epoch
    elif shape == "optimizer":
        # What is beyond a third of forward and backward is the plant.
        usual = run.own["forward"] + run.own["backward"]
        run.own["optimizer"] = usual / 3 + times * (1 + 1 / 3)
    elif dimension == "memory":
        for step in range(steps):
            key = "memory_retries" if shape == "retries" else "memory_oom_retries"
            run.memory[step] = {key: int((bursts[: step + 1] > 0).sum()), "memory_hit_rate": 0.9}
        run.own["forward"] += times
    else:
        phase = {"data": "data_prep", "compute": "backward", "communication": "comm", "framework": "schedule"}[
            dimension
        ]
        run.own["h2d" if shape == "transfer" else phase] += times


def _slow_down(run: _Run, slow: Slow) -> None:
    bursts = np.where(np.arange(run.steps) % slow.every == 0, float(slow.every), 0.0)
    extra = slow.share * run.job.step_ms * bursts * _noise(run.rng, (1, run.steps), 0.05)[0]
    parts: Mapping[str, float] = {slow.phase: 1.0}
    if slow.phase == "compute":
        parts = {"forward": 0.32, "backward": 0.6, "optimizer": 0.08}
    for phase, part in parts.items():
        run.own.setdefault(phase, np.zeros((run.job.ranks, run.steps)))[slow.rank] += part * extra


def _record(run: _Run, updates: np.ndarray, *, with_comm: bool) -> list[Trace]:
    """Lets the ranks' clocks run."""
    job, own = run.job, run.own
    hook = own.get("callback", np.zeros((job.ranks, run.steps)))  # before the batch
    clocks = np.zeros(job.ranks)
    records: list[list[dict[str, Any]]] = [[] for _ in range(job.ranks)]
    for step in range(run.steps):
        epoch, batch = divmod(step, job.epoch)
        if batch == 0:
            for rank in range(job.ranks):
                if epoch:
                    records[rank].append(_span("between_epochs", epoch - 1, run.between[epoch], rank))
                records[rank].append(_span("loader_start", epoch, run.loader[epoch], rank))
        begun = clocks.copy()
        ready = (
            begun + sum(own[phase][:, step] for phase in ("data_prep", "h2d", "forward", "backward")) + hook[:, step]
        )
        reduced = np.full(job.ranks, ready.max()) + own["comm"][:, step] if updates[step] and job.ranks > 1 else ready
        done = reduced + own["optimizer"][:, step] + own["schedule"][:, step]
        clocks = np.full(job.ranks, done.max())  # the flag
        for rank in range(job.ranks):
            wait = reduced[rank] - ready[rank]
            times = {f"{phase}_ms": float(own[phase][rank, step]) for phase in PHASES}
            times["schedule_ms"] += float(hook[rank, step] + clocks[rank] - done[rank])
            times["comm_ms"] = float(wait)
            if not with_comm:
                times["backward_ms"] += times["comm_ms"]
            total = float(clocks[rank] - begun[rank])
            record = {
                "type": "step",
                "step": (step + 1) // job.accumulate,
                "batch": batch,
                "epoch": epoch,
                "rank": rank,
                "optimizer_steps": int(updates[step]),
                "samples": 16,
                "start_ms": float(begun[rank]),
                **times,
                "unattributed_ms": 0.0,
                "total_ms": total,
                "comm_bytes": 1000 if job.ranks > 1 else 0,
            }
            records[rank].append(
                {**record, **run.memory[step], **({} if with_comm else {"comm_ms": None, "comm_bytes": None})}
            )
    headers = [{"rank": rank, "world_size": job.ranks, "attempt": 0, "clock": "host"} for rank in range(job.ranks)]
    return [Trace(Path(f"rank_{rank}"), headers[rank], tuple(records[rank])) for rank in range(job.ranks)]


def _span(name: str, epoch: int, milliseconds: float, rank: int) -> dict[str, Any]:
    return {
        "type": "span",
        "name": name,
        "parent": None,
        "epoch": epoch,
        "rank": rank,
        "start_ms": 0.0,
        "duration_ms": float(milliseconds),
    }


def shapes_of(job: Job) -> list[tuple[str, str]]:
    """Dimensions and shapes that can be planted in a job."""
    return [
        (dimension, shape)
        for dimension, shapes in SHAPES.items()
        for shape in shapes
        if (dimension != "communication" or job.ranks > 1) and (shape not in ("epochs", "between") or job.epoch < 20)
    ]
