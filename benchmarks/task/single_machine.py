"""Whole trainings on one machine: plain Lightning beside Lightning with everything of this package switched on.

python -m benchmarks.task.single_machine
python -m benchmarks.task.single_machine --tasks segmentation photos --seeds 5 --output results.json

Each fit is a process of its own; plain and with the package take turns, and share the seed. Throughput is that of the
training loop behind its first steps, without validation, and with the gaps between epochs. Memory is the highest of the
process above what it had before the fit; freed memory goes back to the system at once in the fits that measure it,
which are not timed. In segmentation, precision and checkpointing act as under pressure; elsewhere they have nothing to
do.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import torch

TASKS = ("language_model", "digits", "photos", "segmentation")


def fit(task: str, contender: str, seed: int, *, gives_back: bool, steps: int | None) -> dict[str, float]:
    """One fit, and what it took."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if gives_back:  # or the C library keeps what was freed, and the process stays as large as it once was
        environment["MALLOC_MMAP_THRESHOLD_"] = str(2**17)
    command = [sys.executable, "-m", "benchmarks.task.one_fit", "--task", task, "--contender", contender]
    command += ["--seed", str(seed), *(["--steps", str(steps)] if steps else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"samples_per_second"')]
    if not lines:
        raise RuntimeError(f"{task}, {contender}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def compare(task: str, seeds: int, steps: int | None) -> dict[str, Any]:
    """Both contenders over all seeds."""
    fits: dict[str, list[dict[str, float]]] = {"plain": [], "hpc": []}
    for seed in range(seeds):
        for contender in ("plain", "hpc") if seed % 2 else ("hpc", "plain"):
            print(f"{task}, seed {seed}: {contender}", file=sys.stderr)
            fits[contender].append(fit(task, contender, seed, gives_back=False, steps=steps))
    # Over an epoch, which shows the peak.
    memory = {each: fit(task, each, 0, gives_back=True, steps=40)["bytes"] for each in fits}
    pairs = list(zip(fits["hpc"], fits["plain"], strict=True))
    ratios = sorted(ours["samples_per_second"] / theirs["samples_per_second"] for ours, theirs in pairs)
    return {
        "task": task,
        "throughput": statistics.median(ratios),
        "throughput_range": [ratios[0], ratios[-1]],
        "memory": memory["hpc"] / memory["plain"],
        "bytes": memory,
        "metric": {name: [each["metric"] for each in found] for name, found in fits.items()},
    }


def describe(result: dict[str, Any]) -> str:
    """A line of the table."""
    low, high = result["throughput_range"]
    metrics = {name: (statistics.fmean(found), min(found), max(found)) for name, found in result["metric"].items()}
    shown = [f"{mean:.3f} ({least:.3f}-{most:.3f})" for mean, least, most in (metrics["plain"], metrics["hpc"])]
    return (
        f"{result['task']:<16}{result['throughput']:>6.2f} ({low:.2f}-{high:.2f}){result['memory']:>10.2f}"
        f"   {shown[0]:<24}{shown[1]}"
    )


def main() -> None:
    """Runs the tasks and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="fits of each (default: 3)")
    parser.add_argument("--steps", type=int, help="of each fit (default: the task's own)")
    parser.add_argument("--output", type=Path, help="also write the results to this JSON file")
    arguments = parser.parse_args()
    results = []
    print(f"{'task':<16}{'samples a second':>20}{'memory':>8}   {'metric, plain':<24}with the package")
    for task in arguments.tasks:
        results.append(compare(task, arguments.seeds, arguments.steps))
        print(describe(results[-1]), flush=True)
    if arguments.output is not None:
        environment = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "processors": os.cpu_count(),
        }
        text = json.dumps({"environment": environment, "results": results}, indent=1)
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
