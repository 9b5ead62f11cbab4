import argparse
import json
from dataclasses import replace

import pytest

from benchmarks.wire_bytes import (
    HEADERS,
    SLACK,
    RankReport,
    Result,
    measure,
    parse_shape,
    parser,
    ranks_by_node,
    shape_name,
    shapes,
    show,
    to_json,
)
from tests.helpers import require_cluster


def result(
    codec: str,
    wire_bytes: tuple[float, ...],
    payload_bytes: tuple[float, ...] | None = None,
    packets: tuple[float, ...] | None = None,
) -> Result:
    nodes = len(wire_bytes)
    return Result((2,) * nodes, codec, 900, wire_bytes, payload_bytes, packets or (0.0,) * nodes)


def test_the_bound_is_the_exact_hierarchys_payload_with_headers_and_slack() -> None:
    assert result("none", (0, 0)).bound == pytest.approx(SLACK * HEADERS * 900)
    assert result("none", (0, 0, 0)).bound == pytest.approx(SLACK * HEADERS * 1200)
    assert result("int8", (0, 0, 0)).bound == pytest.approx(0.27 * SLACK * HEADERS * 1200)
    assert result("int4", (0, 0, 0)).bound == pytest.approx(0.14 * SLACK * HEADERS * 1200)
    assert result("bf16", (0, 0, 0)).bound is None


def test_every_node_must_keep_to_the_bound() -> None:
    bound = SLACK * HEADERS * 900
    assert result("none", (bound, bound)).holds
    assert not result("none", (bound, bound + 1)).holds
    assert not result("none", (bound + 1, 0)).holds
    assert result("ddp", (9 * bound, 9 * bound)).holds


def test_the_counts_are_compared_on_the_node_where_they_are_furthest_apart() -> None:
    payload = 1000.0
    found = result("int8", (HEADERS * payload * 1.01, HEADERS * payload * 0.98), (payload, payload))
    assert found.over_headers == pytest.approx(-0.02)
    found = result("bf16", (1010.0 + 66 * 2, 1020.0 + 66 * 3), (payload, payload), (2.0, 3.0))
    assert found.over_payload == pytest.approx(0.02)
    assert found.holds
    assert result("ddp", (1.0, 1.0)).over_headers is None
    assert result("ddp", (1.0, 1.0)).over_payload is None


@pytest.mark.parametrize("carried", [960.0, 1040.0])
def test_counts_that_disagree_do_not_hold(carried: float) -> None:
    assert not result("bf16", (carried, 1000.0), (1000.0, 1000.0)).holds


def test_reports_of_ranks_become_those_of_nodes() -> None:
    reports = [
        RankReport("none", 400, 100.0, 300.0, 3.0),
        RankReport("none", 400, 50.0, 300.0, 3.0),
        RankReport("none", 400, 70.0, 200.0, 2.0),
    ]
    expected = Result((2, 1), "none", 400, (300.0, 200.0), (150.0, 70.0), (3.0, 2.0))
    assert Result.of([2, 1], reports) == expected
    uncounted = [replace(report, payload_bytes=None) for report in reports]
    assert Result.of([2, 1], uncounted) == replace(expected, payload_bytes=None)


def test_shapes_are_all_even_ones_and_then_the_uneven() -> None:
    options = ["--nodes", "2", "3", "--ranks-per-node", "1", "4", "--uneven", "3,2,1"]
    assert shapes(parser().parse_args(options)) == [(1, 1), (4, 4), (1, 1, 1), (4, 4, 4), (3, 2, 1)]
    assert ranks_by_node([3, 2, 1]) == [[0, 1, 2], [3, 4], [5]]
    assert parse_shape(shape_name([3, 2, 1])) == (3, 2, 1)


@pytest.mark.parametrize("text", ["", "3", "2,0", "2,", "2,-1", "a,b", "1.5,2"])
def test_what_is_no_shape_is_quoted(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' must be the ranks on each of two or more nodes"):
        parse_shape(text)


def test_results_are_shown_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    over, under, free = result("none", (2e3, 2e3), (2e3, 2e3)), result("none", (1.0, 1.0)), result("ddp", (9e9, 9e9))
    for one in (over, under, free):
        show(one)
    lines = capsys.readouterr().out.splitlines()
    assert ["PASS" in line for line in lines] == [False, True, True]
    assert "FAIL" in lines[0]
    content = json.loads(to_json([over, free], parser().parse_args([])))
    assert [one["holds"] for one in content["results"]] == [False, True]
    assert content["results"][0]["bound"] == over.bound


@pytest.mark.root
def test_uneven_nodes_keep_to_the_bound_and_comm_stats_agree_with_the_link() -> None:
    require_cluster()
    found = measure([2, 1], parser().parse_args(["--steps", "3", "--codecs", "none", "int4", "--timeout-s", "300"]))
    assert [one.codec for one in found] == ["none", "int4"]
    assert all(one.holds for one in found), found
