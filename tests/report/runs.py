"""Made-up runs with what real ones have: skew, outliers, warm-up, drift, and neighbours that come and go."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_hpc.report.run_sample import FIGURES, RunSample, reduce_times
from lightning_hpc.trace.records import HEADER_KEYS, header_line, step_line

SKIP = 20
SHARES = {"data_prep": 0.05, "h2d": 0.02, "schedule": 0.1, "forward": 0.28, "backward": 0.4, "optimizer": 0.15}
STEP_MS = 10.0

Times = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Noise:
    """What differs between equal runs.

    Attributes:
        run_spread: Standard deviation of a run's level, as a share.
        busy: Share of the time in which a neighbour burns the processor, in bursts of a second or so.
        interruption: Chance that a step is interrupted while the neighbour is there, for 4 ms in the mean.
    """

    run_spread: float = 0.003
    busy: float = 0.0
    interruption: float = 0.3


def make_times(
    generator: np.random.Generator, steps: int, noise: Noise, growth: Mapping[str, float] | None = None
) -> Times:
    """Milliseconds of each phase and in total, warm-up included.

    Args:
        generator: Of the randomness.
        steps: After warm-up.
        noise: What differs between equal runs.
        growth: By phase, what it grows by, as a share of the whole step.
    """
    count = steps + SKIP
    drift = np.convolve(generator.normal(size=count + 40), 0.8 * 0.6 ** np.arange(40), mode="valid")[:count]
    busy = _busy(generator, count, noise.busy)
    common = np.exp(0.01 * drift + generator.normal(0, noise.run_spread)) * (1 + busy * generator.uniform(0.02, 0.4))
    common *= 1 + 3 * np.exp(-np.arange(count) / 4)
    times = {}
    for phase, share in SHARES.items():
        mean = STEP_MS * (share + (growth or {}).get(phase, 0.0))
        times[phase] = mean * common * np.exp(np.abs(generator.normal(0, 0.02, count)))
    interrupted = generator.random(count) < 0.01 + busy * noise.interruption
    phases = generator.choice(len(SHARES), size=count, p=list(SHARES.values()))
    for index, phase in enumerate(SHARES):
        times[phase] += (interrupted & (phases == index)) * generator.exponential(4.0, count)
    return {"total": np.sum(list(times.values()), axis=0), **times, "comm": np.zeros(count)}


def make_run(times: Times, started_at: float, skip: int = SKIP) -> RunSample:
    """The run as a comparison sees it."""
    total = times["total"][skip:]
    return RunSample(
        started_at=started_at,
        steps=len(total),
        steps_per_second=1e3 * len(total) / float(total.sum()),
        times_ms={figure: reduce_times(list(times[figure][skip:])) for figure in FIGURES if figure in times},
        spans_ms={},
    )


def make_sides(
    generator: np.random.Generator,
    runs: int,
    steps: int,
    noise: Noise,
    growth: Mapping[str, float] | None = None,
    in_turns: bool = True,
) -> tuple[list[RunSample], list[RunSample]]:
    """A base and a new side of equally many runs."""
    first, distance = (1, 2) if in_turns else (runs, 1)
    base = [make_run(make_times(generator, steps, noise), distance * run) for run in range(runs)]
    new = [make_run(make_times(generator, steps, noise, growth), first + distance * run) for run in range(runs)]
    return base, new


def write_trace(
    path: Path, times: Times, *, started_at: float = 0.0, rank: int = 0, world_size: int = 1, comm: bool = True
) -> Path:
    """A file as `StepTrace` writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {key: 0 for key in HEADER_KEYS if key != "schema"}
    facts = {
        "rank": rank,
        "world_size": world_size,
        "started_at": started_at,
        "host": "a",
        "clock": "host",
        "device_type": "cpu",
    }
    lines = [header_line(**{**header, **facts, "versions": {"torch": "2"}})]
    names = ("data_prep", "h2d", "schedule", "forward", "backward", "optimizer")
    for step in range(len(times["total"])):
        charged = [round(times[name][step] * 1e6) for name in names]
        comm_ns = round(times["comm"][step] * 1e6) if comm else None
        total_ns = sum(charged) + (comm_ns or 0)
        where = {"step": step, "batch": step, "epoch": 0, "rank": rank, "optimizer_steps": 1}
        where |= {"samples": 8, "start_ns": round(sum(times["total"][:step]) * 1e6)}
        lines.append(step_line(charged, comm_ns, total_ns, **where, comm_bytes=None))
    path.write_bytes(b"".join(lines))
    return path


def _busy(generator: np.random.Generator, count: int, share: float) -> NDArray[np.float64]:
    """1 where the neighbour is there, 0 elsewhere."""
    busy = np.zeros(count)
    share *= float(np.exp(generator.normal(0, 0.4)))
    at, is_there = 0, generator.random() < share
    while at < count and share > 0:
        factor = 1.0 if is_there else max(1 - share, 0.1) / share
        length = max(1, int(100 * factor * np.exp(generator.normal())))
        busy[at : at + length] = is_there
        at, is_there = at + length, not is_there
    return busy
