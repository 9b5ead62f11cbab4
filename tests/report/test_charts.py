"""Line and bar charts: well-formed, self-contained, with all names escaped."""

import ast
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import lightning_hpc.report
from lightning_hpc.report import Bar, BarChart, LineChart
from lightning_hpc.report.page import page, paragraphs, table

SVG = "{http://www.w3.org/2000/svg}"
NAME = '<script>"a" & b</script>'


def texts(svg: str) -> list[str]:
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme:dark" in svg
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def line_chart(**series: list[float | None]) -> LineChart:
    return LineChart(NAME, "x", "y", ["1", NAME], series, {"ref": [1.0, 2.0]}, note=NAME)


def test_lines_have_their_names_escaped_and_their_values_as_tooltips() -> None:
    chart = LineChart(NAME, "nodes", "y", ["1", "2"], {NAME: [1.0, 0.25]}, {"ideal": [1.0, 2.0]}, note=NAME)
    svg = chart.draw()
    assert texts(svg).count(NAME) == 3  # title, line, note
    assert "<script>" not in svg
    tooltips = [element.text for element in ET.fromstring(svg).iter(f"{SVG}title")]
    assert tooltips == [f"{NAME}, nodes 1: 1", f"{NAME}, nodes 2: 0.25"]


def test_names_at_the_end_of_lines_do_not_overlap() -> None:
    chart = line_chart(**{f"line{index}": [1.0, 1.0 + index / 1000] for index in range(12)})
    root = ET.fromstring(chart.draw())
    places = [float(text.attrib["y"]) for text in root.iter(f"{SVG}text") if (text.text or "").startswith("line")]
    assert len(places) == 12
    gaps = [below - above for above, below in zip(sorted(places), sorted(places)[1:], strict=False)]
    assert min(gaps) > 14


def test_a_line_may_have_holes_or_nothing() -> None:
    root = ET.fromstring(line_chart(holes=[None, 2.0], nothing=[None, None]).draw())
    assert len(list(root.iter(f"{SVG}circle"))) == 1
    assert len(list(root.iter(f"{SVG}polyline"))) == 1  # the reference


def test_higher_values_are_higher_up() -> None:
    root = ET.fromstring(line_chart(line=[0.5, 2.0]).draw())
    low, high = (float(circle.attrib["cy"]) for circle in root.iter(f"{SVG}circle"))
    assert high < low


def test_bars_are_as_long_as_their_values_and_escaped() -> None:
    svg = BarChart(NAME, "x", [Bar(NAME, 1.0, (0.5, 2.0), NAME), Bar("b", 2.0)], note=NAME).draw()
    shown = texts(svg)
    assert {NAME, f"1.00 {NAME}", "2.00", "b"} <= set(shown)
    widths = [
        float(rect.attrib["width"]) for rect in ET.fromstring(svg).iter(f"{SVG}rect") if "series" in str(rect.attrib)
    ]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)


def test_an_empty_chart_is_a_chart() -> None:
    ET.fromstring(BarChart("t", "x", []).draw())
    ET.fromstring(LineChart("t", "x", "y", [], {}).draw())


def test_a_page_escapes_what_it_is_told() -> None:
    html = page(NAME, [paragraphs([NAME]), table([NAME], [[NAME]])])
    assert "<script>" not in html
    assert html.count("&lt;script&gt;") == 5
    assert not re.search(r"(src|href)=", html)


def test_reports_need_neither_torch_nor_lightning() -> None:
    for file in Path(lightning_hpc.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"torch", "lightning"} & {name.split(".")[0] for name in names}, (file, names)
