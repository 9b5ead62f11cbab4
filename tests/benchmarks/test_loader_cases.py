"""Each case gives its figures at a tiny size, and the command shows, writes and judges them."""

import itertools
import json
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.micro.loader_cases.__main__ import CASES, explain, main
from benchmarks.micro.loader_cases.datasets import Sleeping, with_slow_ones
from benchmarks.micro.loader_cases.figures import OWN, PEER, Figure, Size, Target, compare, show, take_turns

# Lightning's and PyTorch's advice on workers

MEASURES = {
    "wait": {"% of the time in next()"},
    "slow-samples": {"batches/s"},
    "epoch-gap": {"longest gap, in steps"},
    "auto": {"ms an epoch", "workers picked", "ms to pick"},
    "jpeg": {"batches/s"},
    "p99": {
        "p50 of next(), ms",
        "p99 of next(), ms",
        "p99 / p50",
        "% of next() interrupted",
        "% of next() with page faults",
    },
    "leaks": {
        "trainer_fds",
        "worker_fds",
        "trainer_maps",
        "worker_maps",
        "trainer_pss_kib",
        "worker_pss_kib",
    },
}


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    """The command silences Lightning, in a process of its own otherwise."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("name", CASES)
def test_each_case_gives_figures_of_both_loaders_and_holds_ours_against_a_target(name: str) -> None:
    if name == "jpeg":
        pytest.importorskip("PIL")
        pytest.importorskip("sklearn")
    figures = list(CASES[name](Size(rounds=1, scale=0.01)))
    assert {figure.measure for figure in figures} == MEASURES[name]
    assert {figure.case for figure in figures} == {name}
    assert all(math.isfinite(value) for figure in figures for value in figure.values)
    assert {OWN, PEER} <= {figure.loader.split(",")[0] for figure in figures}
    settings = {figure.setting for figure in figures}
    assert {figure.setting for figure in figures if figure.holds is not None and OWN in figure.loader} == settings


def test_loaders_take_turns_and_every_second_round_goes_backwards(capsys: pytest.CaptureFixture[str]) -> None:
    count = itertools.count(1)
    found = take_turns(["a", "b"], Size(rounds=3), "case", lambda _: next(count))
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert "case, round 3 of 3: b" in capsys.readouterr().err


def test_a_target_is_asked_of_our_loader_only_and_compared_by_medians() -> None:
    values = {PEER: [1.0, 2.0, 4.0], f"{PEER}, persistent": [1.0, 1.0, 1.0], OWN: [3.0, 1.0, 4.0]}
    peer, persistent, own = compare("case", "2 workers", "s", values, Target("less", lambda _, ratio: ratio < 1))
    assert (peer.over_peer, peer.holds, persistent.holds) == (None, None, None)
    assert persistent.over_peer == (0.5, 0.25, 1.0)
    assert (own.over_peer, own.holds, own.target) == ((1.5, 0.5, 3.0), False, "less")


def test_a_line_of_the_table_has_median_spread_ratio_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    show(Figure("case", "2 workers", OWN, "s", [0.25, 1.0, 12345.0], (2.0, 1.0, 3.0), "at most 2", True))
    printed = capsys.readouterr().out
    assert "1  (0.25 to 12,345)" in printed
    assert "2.00 (1.00 to 3.00)" in printed
    assert printed.endswith("PASS: at most 2\n")


def test_slow_samples_are_always_the_same_ones() -> None:
    seconds = with_slow_ones(200, 0.0, 0.1, share=0.01)
    assert seconds == with_slow_ones(200, 0.0, 0.1, share=0.01)
    assert sorted(seconds.values()) == [0.0] * 198 + [0.1] * 2
    assert len(Sleeping(3, 10, {})[2]) == 10


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"scale": 0.0}])
def test_a_size_of_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Size(**wrong)  # type: ignore[arg-type]


def test_help_explains_every_case() -> None:
    text = explain()
    assert all(f"{name}: " in text for name in CASES)


def test_results_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = Figure("wait", "1 worker", OWN, "%", [1.0, 3.0, 2.0], None, "at most 1", False)
    monkeypatch.setitem(CASES, "wait", lambda size: iter([figure]))
    monkeypatch.setattr(sys, "argv", ["loader_cases", "--cases", "wait", "--output", str(tmp_path / "x.json")])
    assert main() == 1
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["figures"][0]["median"] == 2
    assert content["settings"] == {"cases": ["wait"], "rounds": 5, "scale": 1.0}
    assert "FAIL: at most 1" in capsys.readouterr().out
