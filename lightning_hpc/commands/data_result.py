"""What ``lightning-hpc bench data`` has measured, summed up, and what follows from it in plain words."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from lightning_hpc.comm.link_speed import format_seconds, three_digits
from lightning_hpc.commands.timed_read import TimedRead

PEER = "DataLoader"
"""What the other loader is compared with."""

OWN = "SharedMemoryLoader"

Reads = Mapping[tuple[str, int], Sequence[TimedRead]]
"""For each loader and number of workers, the trial of each round."""

_TIE = 0.05  # closer than that, fewer workers, or the plain loader, are as good
_STEP_WAITS = 0.1  # of the time: less, and it is the step that takes it
_READER_WAITS = 0.5  # of the time: less, and it is the benchmark's own reading that takes most of it


@dataclass(frozen=True)
class DataResult:
    """One loader with one number of workers; medians over rounds.

    Attributes:
        loader: ``"DataLoader"`` or ``"SharedMemoryLoader"``.
        workers: Number of workers.
        samples_per_second: While batches are timed, with the consumer that reads them.
        samples_range: Of the slowest and the fastest round.
        bytes_per_second: Of tensors and arrays.
        ratio: Samples a second over those of `DataLoader` with as many workers; None without that.
        ratio_range: The smallest and largest ratio of two trials of the same round; None for `DataLoader` itself.
        batch_seconds: Time for one batch.
        wait_share: What of the time the consumer waits for the next batch.
        start_seconds: From asking for the first batch until it comes.
        cpu_seconds: Processor seconds for 1,000 samples, of all processes.
    """

    loader: str
    workers: int
    samples_per_second: float
    samples_range: tuple[float, float]
    bytes_per_second: float
    ratio: float | None
    ratio_range: tuple[float, float] | None
    batch_seconds: float
    wait_share: float
    start_seconds: float
    cpu_seconds: float

    @property
    def relation(self) -> str:
        """To `DataLoader`: ``"more"``, ``"less"``, ``"same"`` within 5 %, ``"unclear"`` where rounds disagree."""
        assert self.ratio is not None
        if abs(self.ratio - 1) <= _TIE:
            return "same"
        if self.ratio_range is not None and self.ratio_range[0] < 1 < self.ratio_range[1]:
            return "unclear"
        return "more" if self.ratio > 1 else "less"


def summarize(reads: Reads) -> list[DataResult]:
    """Sums the trials up, by number of workers; where there are none, there is no result."""
    keys = sorted((key for key, trials in reads.items() if trials), key=lambda key: key[1])
    return [_summarize(loader, workers, reads) for loader, workers in keys]


def plateau(results: Sequence[DataResult]) -> DataResult:
    """Of one loader's results, the one with the fewest workers that is within 5 % of the fastest."""
    least = (1 - _TIE) * max(result.samples_per_second for result in results)
    return min((result for result in results if result.samples_per_second >= least), key=lambda result: result.workers)


def verdicts(results: Sequence[DataResult], step_seconds: float = 0.0) -> list[str]:
    """What follows for the user, a sentence each.

    Args:
        results: As `summarize` gives them.
        step_seconds: Of the training step that was simulated; 0 is none.
    """
    by_loader = {name: [result for result in results if result.loader == name] for name in (PEER, OWN)}
    sentences = [_how_many(of_one, step_seconds) for of_one in by_loader.values() if len(of_one) > 1]
    compared = [result for result in by_loader[OWN] if result.ratio is not None]
    if compared:
        sentences.append(_comparison(compared, step_seconds))
    # Without a step, 0 workers may be fastest, but a training would wait while they make its batches.
    useful = [[result for result in of_one if result.workers or step_seconds] for of_one in by_loader.values()]
    if all(useful) and len(results) > 2:
        sentences.append(_choice(*map(plateau, useful)))
    return sentences


def _summarize(loader: str, workers: int, reads: Reads) -> DataResult:
    trials = reads[loader, workers]
    rates, peers = _rates(trials), _rates(reads.get((PEER, workers), ()))
    ratios = [own / peer for own, peer in zip(rates, peers, strict=False)]
    median = statistics.median
    return DataResult(
        loader=loader,
        workers=workers,
        samples_per_second=median(rates),
        samples_range=(min(rates), max(rates)),
        bytes_per_second=median(trial.bytes / trial.seconds for trial in trials),
        ratio=median(rates) / median(peers) if peers else None,
        ratio_range=(min(ratios), max(ratios)) if ratios and loader != PEER else None,
        batch_seconds=median(trial.seconds / trial.batches for trial in trials),
        wait_share=median(trial.wait_seconds / trial.seconds for trial in trials),
        start_seconds=median(trial.start_seconds for trial in trials),
        cpu_seconds=median(1000 * trial.cpu_seconds / trial.samples for trial in trials),
    )


def _rates(trials: Iterable[TimedRead]) -> list[float]:
    return [trial.samples / trial.seconds for trial in trials]


def _how_many(results: Sequence[DataResult], step_seconds: float) -> str:
    """How many workers one loader needs."""
    enough = plateau(results)
    more = [result for result in results if result.workers > enough.workers]
    if more:
        head = f"{_are_enough(enough.workers, step_seconds)}: {_brings(max(more, key=_speed), enough)}"
    else:
        fewer = max((result for result in results if result is not enough), key=_speed)
        than = f"{_brings(enough, fewer)} than {fewer.workers}"
        head = f"{than}, and more workers than were tried may bring more"
    return f"{enough.loader}: {head}; {_waiting(enough, more, step_seconds)}."


def _are_enough(workers: int, step_seconds: float) -> str:
    if not workers:
        return "no workers are needed" if step_seconds else "nothing is faster than 0 workers"
    return f"{_workers(workers)} {'is' if workers == 1 else 'are'} enough"


def _waiting(enough: DataResult, more: Sequence[DataResult], step_seconds: float) -> str:
    """How long a training step would wait. Without workers it always does, however fast batches are made."""
    if step_seconds:
        return f"with {enough.workers} the step waits {100 * enough.wait_share:.0f} % of the time"
    if enough.workers:
        return f"steps of {format_seconds(enough.batch_seconds)} or more need not wait"
    others = plateau(more)
    return (
        f"but then each step waits {format_seconds(enough.batch_seconds)} for its batch, while with"
        f" {_workers(others.workers)} steps of {format_seconds(others.batch_seconds)} or more need not wait"
    )


def _brings(result: DataResult, base: DataResult) -> str:
    return f"{result.workers} {'brings' if result.workers == 1 else 'bring'} {_change(result, base)}"


def _change(result: DataResult, base: DataResult) -> str:
    percent = 100 * (result.samples_per_second / base.samples_per_second - 1)
    if abs(percent) < 0.5:
        return "no more"
    return f"{abs(percent):.0f} % {'more' if percent > 0 else 'less'}"


def _comparison(results: Sequence[DataResult], step_seconds: float) -> str:
    """`SharedMemoryLoader` against `DataLoader`, by number of workers."""
    phrases = []
    of_what = f" the samples of {PEER}"
    for relation, group in groupby(results, lambda result: result.relation):
        members = list(group)
        if relation == "same":
            phrases.append(f"as fast as {PEER} with {_counts(members)}{_reason(members[-1], step_seconds)}")
        elif relation == "unclear":
            phrases.append(f"no clear difference with {_counts(members)} (--rounds and --seconds measure longer)")
        else:
            phrases.append(f"{_ratios(members)} x{of_what} with {_counts(members)}")
            of_what = ""
    return f"{results[0].loader}: {'; '.join(phrases)}."


def _reason(result: DataResult, step_seconds: float) -> str:
    """What takes the time where both loaders are equally fast."""
    if result.wait_share >= (_STEP_WAITS if step_seconds else _READER_WAITS):
        return ", where making the samples takes the time (decode-bound)"
    return f", where {'the step' if step_seconds else 'reading the batches'} takes the time"


def _choice(peer: DataResult, own: DataResult) -> str:
    """The loaders with as many workers as each needs."""
    ratio = own.samples_per_second / peer.samples_per_second
    better, other = (own, peer) if ratio >= 1 else (peer, own)
    names = [f"{result.loader} with {_workers(result.workers)}" for result in (better, other)]
    if abs(ratio - 1) <= _TIE:
        return f"At their best: {names[0]} is as fast as {names[1]}."
    return f"At their best: {names[0]} gives {three_digits(max(ratio, 1 / ratio))} x the samples of {names[1]}."


def _counts(results: Sequence[DataResult]) -> str:
    *others, last = (result.workers for result in results)
    return f"{', '.join(map(str, others))} and {last} workers" if others else _workers(last)


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _ratios(results: Sequence[DataResult]) -> str:
    ratios = sorted(result.ratio for result in results if result.ratio is not None)
    low, high = three_digits(ratios[0]), three_digits(ratios[-1])
    return low if low == high else f"{low} to {high}"


def _speed(result: DataResult) -> float:
    return result.samples_per_second
