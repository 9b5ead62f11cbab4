"""The diagnosis against planted bottlenecks: ``python -m tests.trace.soak_diagnosis --seeds 10 --real``."""

import argparse
import logging
import warnings
from collections import Counter
from collections.abc import Iterator

from tests.helpers import run_ranks
from tests.trace.judging import (
    Confusion,
    confusion_table,
    expected_of,
    first_answer,
    judge_healthy,
    judge_planted,
    judge_stragglers,
    optimizer_excess,
    planted_share,
    right_share,
    with_memory,
)
from tests.trace.real_runs import Plan, record

_LEAST_SHARE = 0.15


def main() -> None:
    """Prints a confusion matrix of each kind, and fails where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="runs of each job, dimension, shape and share")
    parser.add_argument("--healthy", type=int, default=450, help="runs without a bottleneck")
    parser.add_argument("--first-seed", type=int, default=10**6)
    parser.add_argument("--real", action="store_true", help="short real fits too (some minutes)")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    planted = _show("planted, 20 steps, shares 0.15 to 0.5", judge_planted(seeds))
    healthy = _show("healthy", judge_healthy(range(arguments.first_seed, arguments.first_seed + arguments.healthy)))
    steady = _show("one rank 10 % slow, 50 steps", judge_stragglers(seeds))
    _show("the same in every fifth step only", judge_stragglers(seeds, every=5))
    if arguments.real:
        _show("real fits", _judge_real())
    assert planted >= 0.95, planted
    assert healthy >= 0.995, healthy
    assert steady >= 0.95, steady


def _show(title: str, confusion: Confusion) -> float:
    print(f"\n{title}: {right_share(confusion):.1%} of {confusion.total()}\n{confusion_table(confusion)}", flush=True)
    return right_share(confusion)


def _plans() -> Iterator[Plan]:
    for is_noisy in (False, True):
        for width, batch, adam in ((128, 1024, True), (384, 384, False), (640, 128, True)):
            for _ in range(3):
                yield Plan("", 0.0, width, batch, is_noisy=is_noisy, adam=adam)
            for place in ("data", "growth", "spikes", "optimizer", "memory", "framework"):
                for share in (0.2, 0.4, 0.6):
                    yield Plan(place, share, width, batch, is_noisy=is_noisy, adam=adam)
    for share in (0.2, 0.4, 0.6):
        yield Plan("communication", share, 384, 128, ranks=2, steps=36)
    for place in ("data", "forward", "optimizer", "framework"):
        for rank in (0, 1):
            yield Plan(place, 0.2, 384, 192, ranks=2, steps=56, straggler=rank)


def _judge_real() -> Confusion:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    confusion: Confusion = Counter()
    for plan in _plans():
        traces, slept = record(plan, run_ranks)
        if plan.place == "memory":
            traces = [with_memory(trace, each) for trace, each in zip(traces, slept, strict=True)]
        rank = plan.straggler or 0
        share = (
            optimizer_excess(traces[rank]) if plan.place == "optimizer" else planted_share(traces[rank], slept[rank])
        )
        if not plan.place or plan.straggler is not None or share >= _LEAST_SHARE:
            confusion[expected_of(plan), first_answer(traces)] += 1
    return confusion


if __name__ == "__main__":
    main()
