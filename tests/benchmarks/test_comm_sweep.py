import argparse
import json
import xml.etree.ElementTree as ET

import pytest

from benchmarks.comm_sweep import RateResult, choice, rate_name, show, to_json, to_svg
from lightning_hpc.commands.comm_result import summarize
from lightning_hpc.commands.timed_fit import TimedFit


def result(rate: float, auto_seconds: float) -> RateResult:
    fits = {
        "ddp": [[TimedFit([0.4], 1000)]],
        "none": [[TimedFit([0.3], 1000, predicted={"ddp": 0.5, "none": 0.3, "int8": 0.1})]],
        "int8": [[TimedFit([0.1], 1000, sent_bytes={"inter_node": 2e6})]],
        "auto": [[TimedFit([auto_seconds], 1000, choice="int8")]],
    }
    return RateResult(rate, summarize(fits, 4), [])


def test_strategies_go_by_the_cost_models_names() -> None:
    assert [choice(name) for name in ("ddp", "hpc", "hpc:int8")] == ["ddp", "none", "int8"]
    assert [rate_name(rate) for rate in (50.0, 0.0)] == ["50 Mbit/s", "unshaped"]


def test_auto_is_compared_with_the_best_fixed_choice(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(50, 0.2)
    assert found.auto_against_best == ("int8", pytest.approx(0.5))
    show(found)
    printed = capsys.readouterr().out
    assert "auto against the best fixed choice, int8: 0.50" in printed
    assert "auto (int8)" in printed


def test_results_are_written() -> None:
    found = [result(50, 0.1), result(0, 0.1)]
    content = json.loads(to_json(found, argparse.Namespace(steps=3, output=[])))
    assert [rate["rate_mbit"] for rate in content["rates"]] == [50, 0]
    assert content["rates"][0]["results"][2]["prediction_error"] == pytest.approx(0.0)
    texts = [element.text for element in ET.fromstring(to_svg(found)).iter("{http://www.w3.org/2000/svg}text")]
    assert {"50 Mbit/s", "unshaped", "int8", "auto"} <= set(texts)
