"""How often the gate is wrong, by the thousand.

``python -m tests.report.soak_comparison simulate --pairs 2000`` on made-up runs;
``python -m tests.report.soak_comparison record DIRECTORY --runs 600`` and then ``… pairs DIRECTORY`` on real ones.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lightning_hpc.report.comparison import Comparison, Verdict, compare_runs
from lightning_hpc.report.run_sample import RunSample
from lightning_hpc.report.side import read_side
from tests.report.recording import record
from tests.report.runs import SHARES, SKIP, Noise, make_sides

ALL_PHASES: Mapping[str, float] = {phase: 0.05 * share for phase, share in SHARES.items()}
ONE_PHASE: Mapping[str, float] = {"forward": 0.05}
_GROWTHS = {"equal": None, "+5 % in all": ALL_PHASES, "+5 % in forward": ONE_PHASE}

Sides = tuple[Sequence[RunSample], Sequence[RunSample]]


def simulate(
    pairs: int,
    runs: int,
    steps: int,
    noise: Noise,
    growth: Mapping[str, float] | None,
    seed: int,
    in_turns: bool = True,
) -> list[Comparison]:
    """Comparisons of made-up pairs of sides."""
    generators = (np.random.default_rng([seed, pair]) for pair in range(pairs))
    return [compare_runs(*make_sides(generator, runs, steps, noise, growth, in_turns)) for generator in generators]


def plant(run: RunSample, growth: float, phases: Sequence[str]) -> RunSample:
    """The run with some phases grown alike, by that share of the median step together, neighbours and all."""
    total = np.median(run.times_ms["total"])
    factor = 1 + growth * total / sum(np.median(run.times_ms[phase]) for phase in phases)
    times = {figure: values * (factor if figure in phases else 1) for figure, values in run.times_ms.items()}
    return replace(run, times_ms={**times, "total": run.times_ms["total"] * (1 + growth)})


def real_sides(pool: Sequence[RunSample], runs: int, pairs: int, seed: int, in_turns: bool) -> Iterator[Sides]:
    """Sides out of neighbouring runs of a pool; where it is too small for so many, pairs share runs."""
    generator = np.random.default_rng(seed)
    for pair in range(pairs):
        last = len(pool) - 2 * runs
        start = pair * 2 * runs if pairs * 2 * runs <= len(pool) else int(generator.integers(0, last + 1))
        window = pool[start : start + 2 * runs]
        sides = (window[::2], window[1::2]) if in_turns else (window[:runs], window[runs:])
        yield sides if generator.random() < 0.5 else (sides[1], sides[0])


def summary(comparisons: Sequence[Comparison]) -> str:
    """Shares of verdicts."""
    count = len(comparisons)
    alarms = sum(comparison.is_regression for comparison in comparisons)
    noisy = sum(comparison.total.verdict is Verdict.NOISY for comparison in comparisons)
    named = sum(
        phase.figure == "forward" and phase.verdict is Verdict.REGRESSION
        for comparison in comparisons
        for phase in comparison.phases
    )
    return f"exit status 1: {alarms}/{count} = {alarms / count:.2%}, forward named: {named}, too noisy: {noisy}"


def main() -> None:
    """Prints how often the gate says that something has become slower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("simulate", "record", "pairs"))
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs"))
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 3, 5, 8])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--spread", type=float, nargs="+", default=[0.003, 0.01])
    parser.add_argument("--busy", type=float, nargs="+", default=[0.0, 0.2])
    parser.add_argument("--burn", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.mode == "record":
        record(arguments.directory, max(arguments.runs), arguments.steps, arguments.burn, arguments.seed)
    elif arguments.mode == "pairs":
        _print_real(arguments)
    else:
        _print_simulated(arguments)


def _print_simulated(arguments: argparse.Namespace) -> None:
    for runs in arguments.runs:
        for noise in (Noise(spread, busy) for spread in arguments.spread for busy in arguments.busy):
            for name, growth in _GROWTHS.items():
                for in_turns in (True, False) if runs > 1 else (True,):
                    done = simulate(
                        arguments.pairs, runs, arguments.steps, noise, growth, arguments.seed, in_turns=in_turns
                    )
                    order = "in turns" if in_turns else "in blocks"
                    title = f"{runs} runs a side {order}, spread {noise.run_spread:.1%}, busy {noise.busy:.0%}, {name}"
                    print(f"{title}: {summary(done)}", flush=True)


def _print_real(arguments: argparse.Namespace) -> None:
    sides = [read_side([path], SKIP) for path in sorted(arguments.directory.glob("*_equal_*"))]
    slower = [read_side([path], SKIP) for path in sorted(arguments.directory.glob("*_slower"))]
    pool, slow_pool = ([run for side in kind for run in side.runs] for kind in (sides, slower))
    print(f"{len(pool)} equal runs, {len(slow_pool)} slower ones")
    for runs in arguments.runs:
        for in_turns in (True, False):
            pairs = list(real_sides(pool, runs, arguments.pairs, arguments.seed, in_turns))
            title = f"{runs} runs a side {'in turns' if in_turns else 'in blocks'}"
            print(f"{title}, equal: {summary([compare_runs(*pair) for pair in pairs])}", flush=True)
            for name, phases in (("all", tuple(SHARES)), ("forward", ("forward",))):
                planted = [(base, [plant(run, 0.05, phases) for run in new]) for base, new in pairs]
                print(f"{title}, +5 % in {name}: {summary([compare_runs(*pair) for pair in planted])}", flush=True)
        recorded = list(_recorded(pool, slow_pool, runs, arguments.pairs, arguments.seed))
        if recorded:
            growth = [comparison.total.undisturbed for comparison in recorded]
            median = np.median([look.ratio for look in growth if look is not None])
            print(f"{runs} runs a side, in turns with slower ones ({median - 1:+.1%}): {summary(recorded)}", flush=True)


def _recorded(
    pool: Sequence[RunSample], slow_pool: Sequence[RunSample], runs: int, pairs: int, seed: int
) -> Iterator[Comparison]:
    """Equal runs with the slower ones that were recorded between them."""
    generator = np.random.default_rng(seed)
    bases = list(pool[::2])
    last = min(len(bases), len(slow_pool)) - runs
    for _ in range(pairs if last >= 0 else 0):
        start = int(generator.integers(0, last + 1))
        yield compare_runs(bases[start : start + runs], slow_pool[start : start + runs])


if __name__ == "__main__":
    main()
