import json
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from lightning_hpc.report.comparison import compare_runs
from lightning_hpc.report.comparison_report import COLUMNS, ComparisonReport
from lightning_hpc.report.side import Side
from tests.report.runs import Noise, make_sides
from tests.report.soak_comparison import ALL_PHASES, ONE_PHASE

ENVIRONMENT = {"world_size": 1, "hosts": ["a"], "clocks": ["host"], "versions": ["torch 2"]}
NAME = "a`b|c <script>@user\n# x"


def report(runs: int = 4, spread: float = 0.003, growth: Mapping[str, float] | None = None) -> ComparisonReport:
    base, new = make_sides(np.random.default_rng(0), runs, 400, Noise(spread), growth)
    sides = (Side(name, tuple(kind), ENVIRONMENT) for name, kind in (("main", base), ("branch", new)))
    return ComparisonReport(compare_runs(base, new), *sides)


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (report(growth=ALL_PHASES), r"regression: the step \+[45]\.\d% \("),
        (report(growth=ONE_PHASE), r"regression: the step .*; forward \+1\d\.\d% \("),
        (report(), "no difference: the step [+-]0"),
        (report(spread=0.1), r"too noisy to tell: only a growth of \d+\.\d% would have stood out"),
    ],
)
def test_the_verdict_comes_first(made: ComparisonReport, verdict: str) -> None:
    assert re.match(verdict, made.headline)
    assert made.to_markdown().startswith(f"**lightning-hpc compare: {made.headline.partition(': ')[0]}**: ")


def test_the_table_has_step_phases_and_information() -> None:
    rows = report().rows
    names = [row[0] for row in rows]
    assert names[:3] == ["step, median", "step, undisturbed", "data_prep"]
    assert "steps/s, median run" in names
    assert all(len(row) == len(COLUMNS) for row in rows)


def test_names_from_files_cannot_break_out_of_the_markdown() -> None:
    made = report()
    run = made.base.runs[0]
    spans = type(run)(run.started_at, run.steps, run.steps_per_second, run.times_ms, {NAME: 1.0})
    other = {**ENVIRONMENT, "hosts": [NAME]}
    text = ComparisonReport(made.comparison, Side(NAME, (spans,), other, (NAME,)), made.new).to_markdown()
    assert "\n# x" not in text
    tables = [line for line in text.split("\n") if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {len(COLUMNS) + 1}
    outside = re.sub(r"`[^`\n]*`", "", text)
    assert not re.findall(r"(?<!\\)[<@]", outside)


def test_what_speaks_against_the_comparison_is_said() -> None:
    made = report()
    other = {**ENVIRONMENT, "versions": ["torch 3"], "hosts": ["b"]}
    changed = ComparisonReport(made.comparison, made.base, Side("x", made.new.runs, other, ("one rank is missing",)))
    assert made.warnings == []
    assert changed.warnings == ["hosts differ: a and b", "versions differ: torch 2 and torch 3", "one rank is missing"]
    assert "One run each" in report(runs=1).notes[-1]


def test_a_side_without_runs_has_a_verdict_and_no_table() -> None:
    base, _ = make_sides(np.random.default_rng(0), 1, 400, Noise())
    made = ComparisonReport(compare_runs(base, []), Side("a", tuple(base), ENVIRONMENT), Side("b", (), ENVIRONMENT))
    assert made.headline.startswith("too few steps to tell")
    assert made.rows == []
    assert "|--" not in made.to_markdown()
    assert json.loads(made.to_json())["total"]["verdict"] == "too few steps to tell"


def test_json_has_all_figures() -> None:
    content = json.loads(report(growth=ONE_PHASE).to_json())
    assert content["schema"] == "lightning_hpc.comparison/1"
    assert content["is_regression"] is True
    assert content["phases"]["forward"]["verdict"] == "regression"
    assert content["total"]["median"].keys() == {"base_ms", "new_ms", "low", "high", "ratio", "resolution"}
    assert len(content["base"]["runs"]) == 4


def test_spans_that_have_grown_by_much_are_in_the_first_line_though_nobody_judges_them() -> None:
    made = report()
    slower = tuple(replace(run, spans_ms={**run.spans_ms, "checkpoint": 1e6}) for run in made.new.runs)
    changed = ComparisonReport(made.comparison, made.base, replace(made.new, runs=slower))
    assert made.headline in changed.headline
    assert re.search(r"; not judged, but grown: checkpoint \(.* to 1e\+06 ms a run\)$", changed.headline)
    assert "not judged" not in made.headline
