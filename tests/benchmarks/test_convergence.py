import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.convergence import train
from benchmarks.convergence.train import Result, Training
from tests.helpers import run_ranks


def arguments(path: Path, *more: str) -> Any:
    return train.parse(["--output", str(path / "found.json"), *more])


def result(strategy: str, seed: int, loss: float, accuracy: float = 0.9, **found: Any) -> Result:
    return Result(
        Training("digits", strategy, seed), loss, accuracy, 10, 2.0, **{"buckets": {}, "choices": [], **found}
    )


PEER = [result("ddp", seed, loss) for seed, loss in enumerate((1.0, 1.2, 1.1), 1)]


@pytest.mark.parametrize(
    ("metric", "mean", "verdict"),
    [
        ("loss", 1.2, "inside"),
        ("loss", 1.21, "worse"),
        ("loss", 0.99, "better"),
        ("accuracy", 1.0, "inside"),
        ("accuracy", 0.99, "worse"),
        ("accuracy", 1.21, "better"),
        ("loss", float("nan"), "worse"),
    ],
)
def test_a_mean_outside_the_peers_seeds_is_worse_or_better(metric: str, mean: float, verdict: str) -> None:
    assert train.judge(mean, [1.0, 1.2, 1.1], metric) == verdict


def test_strategies_are_compared_seed_by_seed() -> None:
    # The third seed of int3 is still missing, and the other task's results do not count.
    other = Result(Training("lm", "int3", 3), 9.0, 0.1, 10, 2.0, {}, [])
    found = train.compare([*PEER, result("int3", 2, 1.24), result("int3", 1, 1.06), other], "digits", "loss")["int3"]
    assert found.values == [1.06, 1.24]
    assert found.differences == pytest.approx([0.06, 0.04])
    assert found.t == pytest.approx(0.05 / (0.02 / 2**0.5 / 2**0.5))
    assert found.verdict == "inside"
    assert train.compare(PEER, "digits", "loss")["ddp"].t is None


def test_trainings_that_need_the_same_links_are_together(tmp_path: Path) -> None:
    planned = train.plan(arguments(tmp_path, "--task", "lm", "digits", "--strategies", "auto", "int3", "--seeds", "2"))
    assert [one.task for one in planned] == ["lm"] * 6 + ["digits"] * 6
    assert [one.strategy for one in planned[:6]] == ["ddp", "int3", "ddp", "int3", "auto", "auto"]
    assert [train.link_rate(one) for one in planned[:6]] == [None] * 4 + [200.0] * 2


def test_results_are_read_again_under_the_same_settings_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path, "--steps", "7")
    assert train.read(given) == []
    found = [*PEER, result("auto", 1, 1.0, buckets={"int3": 5}, choices=["int3"])]
    train.write(found, given)
    assert train.read(given) == found
    assert json.loads(given.output.read_text())["comparisons"]["digits"]["loss"]["auto"]["verdict"] == "inside"
    with pytest.raises(SystemExit):
        arguments(tmp_path, "--steps", "8")
    assert "name another --output" in capsys.readouterr().err


def test_one_seed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(tmp_path, "--seeds", "1")
    assert "--seeds 1: at least 2" in capsys.readouterr().err


def test_progress_says_what_is_left(tmp_path: Path) -> None:
    planned = train.plan(arguments(tmp_path, "--task", "digits", "--strategies", "int3", "--seeds", "3"))
    assert train.progress(PEER[0], PEER[:1], planned) == (
        "1/6 digits ddp seed 1: loss 1.0000, accuracy 0.9000, 10 steps, 2 s; about 0 min left"
    )


def test_tables_name_verdicts_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    tuned = [result("auto", seed, 2.0, buckets={"int3": 9, "int8": 1}, choices=["int8", "int3"]) for seed in (1, 2, 3)]
    train.show([*PEER, *tuned], "digits", "loss")
    train.show_choices([*PEER, *tuned], "digits")
    printed = capsys.readouterr().out
    assert "auto        2.0000  0.0000  worse" in printed
    assert "auto: int3 sent 90.0% of the buckets, last choice of 3 trainings" in printed


def both_strategies(rank: int, world_size: int, output: str) -> list[Result]:
    given = train.parse(["--output", output, "--steps", "2", "--epochs", "1"])
    strategies = ("ddp", "none", "int3")
    train.work([Training("digits", strategy, 1) for strategy in strategies], given)
    return train.read(given)


def test_a_seed_gives_all_strategies_the_same_start_and_batches(tmp_path: Path) -> None:
    output = str(tmp_path / "found.json")
    run_ranks(both_strategies, 2, output, init_gloo=False, env={"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"})
    peer, exact, lossy = train.read(train.parse(["--output", output, "--steps", "2", "--epochs", "1"]))
    assert (exact.loss, exact.accuracy, exact.steps) == (peer.loss, peer.accuracy, peer.steps)
    assert lossy.loss != peer.loss
    assert lossy.buckets.keys() == {"int3"}
