"""Rules for computation. To compute is what a training is for, so only computation out of the ordinary is a bottleneck.

The ratio of backward to forward is not judged: checkpointing, frozen layers, manual optimisation and a host that only
launches each move it by as much as a fault would.
"""

import math
from dataclasses import replace

import numpy as np

from lightning_hpc.trace.candidate import Candidate
from lightning_hpc.trace.step_table import Mask, StepTable, Times

_LEAST_SHARE = 0.10
# Confidence in what may be something else.
_WITHOUT_COMM = 0.5
# A slow-down is seen against the level of the first steps, which hold some of it already: of a ramp that costs 15 % it
# shows 10 %.
_LEAST_SLOWDOWN = 0.06
_MOST_LEVELS = 8
_STEPS_A_LEVEL = 4
# One-sided level of 0.5 % of a rank test for "later steps take longer".
_GROWS = 2.6
# A spike is 40 % longer than usual, and four of the run's own deviations; these are taken below the median, where
# spikes do not widen them.
_SPIKE = 0.4
_SPIKE_DEVIATIONS = 4.0
# Two may be chance: one step in a hundred is disturbed on any machine. What is over after the first half was a warm-up.
_LEAST_SPIKES = 3
_LEAST_SPIKES_SHARE = 0.07
_LATER_SPIKES = 0.25
# An optimizer touches each parameter a few times, forward and backward do so for each sample. Adam took 0.06 to 0.11 of
# their time with 512 to 1,024 rows of a perceptron on a CPU, and 0.5 to 1.2 with 16 to 256.
_ORDINARY_OPTIMIZER = 1 / 3


def compute_rules(table: StepTable, affected: Mask) -> list[Candidate]:
    """Slow-down over the run, spikes, and an optimizer out of proportion.

    Args:
        table: The iterations.
        affected: True where memory ran short, which is not held against computation: shape (steps,).
    """
    work = (
        table.shared("forward", "backward")
        if table.knows_comm
        else table.unwaited("backward") + table.unwaited("forward")
    )
    usual = _usual(work, table)
    relative = work / np.maximum(usual, 1e-9)
    candidates = [_slowdown(relative, usual), _spikes(relative, usual, affected)]
    if len(table.ranks) > 1 and not table.knows_comm:
        candidates = [_doubted(candidate) for candidate in candidates]
    return [*candidates, _optimizer(table, work)]


def _doubted(candidate: Candidate) -> Candidate:
    """What may be a wait for gradients that nobody measured."""
    evidence = f'{candidate.evidence}; waits for the network may be in it, which strategy="hpc" tells apart'
    return replace(candidate, evidence=evidence, most_confidence=_WITHOUT_COMM)


def _usual(work: Times, table: StepTable) -> Times:
    """The median of the steps of the same kind: those that synchronise gradients take longer than those that do not."""
    usual = np.full_like(work, np.median(work))
    for kind in (table.updates, ~table.updates):
        if kind.sum() >= 3:
            usual[kind] = np.median(work[kind])
    return usual


def _slowdown(relative: Times, usual: Times) -> Candidate:
    edges = np.array_split(np.arange(len(relative)), min(_MOST_LEVELS, len(relative) // _STEPS_A_LEVEL))
    levels = np.array([np.median(relative[edge]) for edge in edges])
    level = np.concatenate([np.full(len(edge), value) for edge, value in zip(edges, levels, strict=True)])
    # A bulge in the middle is no growth.
    grows = _trend(relative) > _GROWS and levels[-1] > (1 + _LEAST_SLOWDOWN) * levels[0]
    lost = (level - levels[0]) * usual if grows else np.zeros_like(usual)
    first, last = levels[0] * np.median(usual), levels[-1] * np.median(usual)
    return Candidate(
        "compute",
        lost,
        f"forward and backward took {first:.3g} ms at first and {last:.3g} ms in the end, and grew with the steps",
        "look for a device that throttles or is shared (clocks, temperature, other processes), and for what grows with"
        " the steps: lists of losses that keep their graphs, a cache without a limit, longer samples",
        _LEAST_SLOWDOWN,
    )


def _trend(values: Times) -> float:
    """How surely time grows, in standard deviations of a rank test.

    The larger of Spearman's, which sees a ramp best, and that of Mann and Whitney between the first and the last third,
    which sees a jump best.
    """
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    spearman = float(np.corrcoef(ranks, np.arange(len(values)))[0, 1]) * math.sqrt(len(values) - 1)
    third = len(values) // 3
    # A search, since comparing all pairs takes gigabytes for a long run.
    wins = float((third - np.searchsorted(np.sort(values[-third:]), values[:third], side="right")).sum())
    mann_whitney = (wins - third**2 / 2) / math.sqrt(third**2 * (2 * third + 1) / 12)
    return max(spearman, mann_whitney)


def _spikes(relative: Times, usual: Times, affected: Mask) -> Candidate:
    below = 1.0 - relative[relative <= 1.0]
    deviation = 1.4826 * float(np.median(below)) if len(below) else 0.0
    is_spike = (relative > 1 + max(_SPIKE, _SPIKE_DEVIATIONS * deviation)) & ~affected
    lost = np.where(is_spike, (relative - 1) * usual, 0.0)
    if is_spike.sum() < _LEAST_SPIKES or lost[len(lost) // 2 :].sum() < _LATER_SPIKES * lost.sum():
        lost = np.zeros_like(lost)
    longest = float((relative * usual)[is_spike].mean()) if is_spike.any() else 0.0
    return Candidate(
        "compute",
        lost,
        f"{is_spike.sum()} of {len(usual)} steps took {longest:.3g} ms in forward and backward, the others"
        f" {np.median(usual):.3g} ms",
        "look for recompilation (TORCH_LOGS=recompiles; torch.compile(dynamic=True)), for a few batches much larger"
        " than the others (TokenBudgetBatchSampler), and for other processes on the machine",
        _LEAST_SPIKES_SHARE,
    )


def _optimizer(table: StepTable, work: Times) -> Candidate:
    optimizer = table.shared("optimizer")
    ratio = optimizer.sum() / max(work.sum(), 1e-9)
    return Candidate(
        "compute",
        optimizer - _ORDINARY_OPTIMIZER * work,
        f"the optimizer takes {optimizer.mean():.3g} ms a step, {ratio:.0%} of forward and backward; a third is ample",
        "fused=True in the optimizer; a larger batch or accumulate_grad_batches, so that it steps less often",
        _LEAST_SHARE,
    )
