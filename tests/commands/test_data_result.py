"""What follows from measured throughput, with numbers made by hand."""

import dataclasses

import pytest

from lightning_hpc.commands.data_result import OWN, PEER, DataResult, plateau, summarize, verdicts
from lightning_hpc.commands.timed_read import TimedRead


def trial(samples_per_second: float, **rest: float) -> TimedRead:
    """Two seconds of reading."""
    numbers: dict[str, float] = {
        "samples": 2 * samples_per_second,
        "bytes": 2e6,
        "batches": 4,
        "seconds": 2.0,
        "wait_seconds": 1.5,
        "start_seconds": 0.1,
        "cpu_seconds": 3.0,
        **rest,
    }
    return TimedRead(**numbers)  # type: ignore[arg-type]


def curve(rates: dict[int, float], loader: str = PEER, wait_share: float = 0.9) -> list[DataResult]:
    """Results from samples a second by number of workers."""
    return [
        DataResult(
            loader=loader,
            workers=workers,
            samples_per_second=rate,
            samples_range=(rate, rate),
            bytes_per_second=1e6,
            ratio=None,
            ratio_range=None,
            batch_seconds=1 / rate,
            wait_share=wait_share,
            start_seconds=0.1,
            cpu_seconds=1.0,
        )
        for workers, rate in rates.items()
    ]


def against(ratio: float, workers: int, spread: float = 0.01, wait_share: float = 0.9) -> DataResult:
    """`SharedMemoryLoader` with so many workers, compared."""
    (result,) = curve({workers: 100 * ratio}, OWN, wait_share)
    return dataclasses.replace(result, ratio=ratio, ratio_range=(ratio - spread, ratio + spread))


def test_medians_spreads_and_ratios_of_the_same_round() -> None:
    results = summarize(
        {
            (PEER, 2): [trial(100), trial(200), trial(400)],
            (OWN, 2): [trial(300, start_seconds=0.5), trial(400, start_seconds=0.2), trial(500, start_seconds=0.1)],
            (PEER, 1): [],
            (OWN, 1): [trial(50)],
        }
    )
    by_key = {(result.loader, result.workers): result for result in results}
    assert [result.workers for result in results] == [1, 2, 2]
    peer, own = by_key[PEER, 2], by_key[OWN, 2]
    assert peer.samples_per_second == 200
    assert peer.samples_range == (100.0, 400.0)
    assert (peer.ratio, peer.ratio_range) == (1, None)
    assert peer.batch_seconds == 0.5
    assert own.ratio == 2
    assert own.ratio_range == pytest.approx((1.25, 3.0))
    assert own.start_seconds == 0.2
    assert own.bytes_per_second == 1e6
    assert own.wait_share == 0.75
    assert own.cpu_seconds == pytest.approx(1000 * 3 / 800)
    assert by_key[OWN, 1].ratio is None


def test_the_plateau_is_the_smallest_count_within_five_percent_of_the_best() -> None:
    assert plateau(curve({0: 10, 1: 50, 2: 96, 4: 100, 8: 99})).workers == 2
    assert plateau(curve({0: 10, 1: 50, 2: 94, 4: 100, 8: 99})).workers == 4
    assert plateau(curve({0: 100, 1: 30})).workers == 0


@pytest.mark.parametrize(
    ("rates", "sentence"),
    [
        (
            {2: 50, 4: 99, 8: 100},
            "DataLoader: 4 workers are enough: 8 bring 1 % more; steps of 10.1 ms or more need not wait.",
        ),
        (
            {0: 50, 1: 100, 2: 88},
            "DataLoader: 1 worker is enough: 2 bring 12 % less; steps of 10.0 ms or more need not wait.",
        ),
        (
            {0: 100, 1: 50, 2: 50.1},
            "DataLoader: nothing is faster than 0 workers: 2 bring 50 % less; but then each step waits 10.0 ms for its"
            " batch, while with 1 worker steps of 20.0 ms or more need not wait.",
        ),
        (
            {0: 40, 4: 50, 8: 100},
            "DataLoader: 8 bring 100 % more than 4, and more workers than were tried may bring more; steps of 10.0 ms"
            " or more need not wait.",
        ),
    ],
)
def test_how_many_workers_are_enough_in_a_sentence(rates: dict[int, float], sentence: str) -> None:
    assert verdicts(curve(rates)) == [sentence]


def test_with_a_step_the_sentence_says_how_long_it_waits() -> None:
    assert verdicts(curve({2: 99, 4: 100}, wait_share=0.031), step_seconds=0.02) == [
        "DataLoader: 2 workers are enough: 4 bring 1 % more; with 2 the step waits 3 % of the time."
    ]
    assert verdicts(curve({0: 100, 1: 99.8}, wait_share=0.2), step_seconds=0.02) == [
        "DataLoader: no workers are needed: 1 brings no more; with 0 the step waits 20 % of the time."
    ]


def comparison(*results: DataResult, step_seconds: float = 0.0) -> str:
    return next(line for line in verdicts(results, step_seconds) if " the samples of " in line or "fast" in line)


def test_the_comparison_goes_through_the_counts_and_says_what_takes_the_time() -> None:
    results = against(0.8, 0), against(2.1, 1), against(1.9, 2), against(1.0, 4), against(0.98, 8)
    assert comparison(*results) == (
        "SharedMemoryLoader: 0.80 x the samples of DataLoader with 0 workers; 1.90 to 2.10 x with 1 and 2 workers;"
        " as fast as DataLoader with 4 and 8 workers, where making the samples takes the time (decode-bound)."
    )


@pytest.mark.parametrize(
    ("wait_share", "step_seconds", "reason"),
    [
        (0.9, 0.0, "where making the samples takes the time (decode-bound)."),
        (0.2, 0.0, "where reading the batches takes the time."),
        (0.2, 0.05, "where making the samples takes the time (decode-bound)."),
        (0.05, 0.05, "where the step takes the time."),
    ],
)
def test_what_takes_the_time_depends_on_who_waits(wait_share: float, step_seconds: float, reason: str) -> None:
    assert comparison(against(1.0, 2, wait_share=wait_share), step_seconds=step_seconds).endswith(reason)


def test_where_rounds_disagree_nothing_is_claimed() -> None:
    (sentence,) = verdicts([against(1.3, 2, spread=0.5)])
    assert sentence == (
        "SharedMemoryLoader: no clear difference with 2 workers (--rounds and --seconds measure longer)."
    )


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (150, "SharedMemoryLoader with 2 workers gives 1.50 x the samples of DataLoader with 4 workers."),
        (101, "SharedMemoryLoader with 2 workers is as fast as DataLoader with 4 workers."),
        (50, "DataLoader with 4 workers gives 2.00 x the samples of SharedMemoryLoader with 2 workers."),
    ],
)
def test_the_last_sentence_compares_each_at_its_best(own: float, sentence: str) -> None:
    results = [*curve({2: 60, 4: 100}), *curve({2: own, 4: own}, OWN)]
    assert verdicts(results)[-1] == f"At their best: {sentence}"


def test_without_workers_nothing_can_be_best_unless_the_step_is_known() -> None:
    results = [*curve({0: 900, 1: 100}), *curve({0: 900, 1: 300}, OWN)]
    own, peer = f"{OWN} with 1 worker", f"{PEER} with 1 worker"
    assert verdicts(results)[-1] == f"At their best: {own} gives 3.00 x the samples of {peer}."
    known = f"{OWN} with 0 workers is as fast as {PEER} with 0 workers"
    assert verdicts(results, step_seconds=0.1)[-1] == f"At their best: {known}."


def test_one_result_says_nothing() -> None:
    assert verdicts(curve({4: 100})) == []
    assert verdicts([]) == []
