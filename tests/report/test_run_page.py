"""The page: whole without a network, harmless whatever the names, and right in a browser."""

import html.parser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_hpc.report.run_page import run_page
from lightning_hpc.report.run_report import RunReport, report_of
from tests.report.run_traces import HOSTILE, hostile_traces, make_traces, with_memory


def reports() -> dict[str, RunReport]:
    memory = [
        with_memory(trace, memory_used_bytes=7e9, memory_limit_bytes=9e9, memory_hit_rate=0.9, gpu_utilization=0.5)
        for trace in make_traces("4 ranks", steps=300, dimension="data", share=0.3)
    ]
    return {
        "healthy": report_of(make_traces(steps=300), {"accuracy": 0.9, "x" * 10_000: float("nan")}),
        "everything": report_of(memory),
        "one step": report_of(make_traces(steps=1)),
        "no comm": report_of(make_traces("2 ranks", with_comm=False)),
        "eight ranks": report_of(make_traces("8 ranks")),
        "hostile": report_of(hostile_traces()),
    }


CASES = ("healthy", "everything", "one step", "no comm", "eight ranks", "hostile")


class Checker(html.parser.HTMLParser):
    """Finds what may not be in the page, and tags that do not close."""

    VOID = ("meta", "link", "br", "line", "path", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("case", CASES)
def test_the_page_is_whole_and_asks_for_nothing(case: str) -> None:
    page = run_page(reports()[case], "a run")
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    for tag, attributes in checker.seen:
        assert tag not in ("script", "img", "iframe", "object")
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "data:,") == "data:,"
        assert "src" not in attributes
    assert not re.search(r"url\(|@import|https?://", page)
    assert "nan" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL).lower().split()


def test_names_stay_text() -> None:
    page = run_page(report_of(hostile_traces()), HOSTILE)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 8


def test_metrics_that_are_many_long_or_infinite_are_shown() -> None:
    metrics = {"l" * 10_000: float("inf"), **{f"metric_{number}": float(number) for number in range(20)}}
    page = run_page(report_of(make_traces(), metrics), "run")
    assert "l" * 100 not in page
    assert "not finite" in page
    assert page.count("metric_6<") == 2  # a tile, and a row of the table
    assert page.count("metric_19<") == 1


def test_the_diagnosis_is_on_top() -> None:
    page = run_page(reports()["everything"], "a run")
    assert page.index("Waiting for data takes") < page.index("Step time") < page.index("Ranks</h2>")
    assert "Try first:" in page
    healthy = run_page(reports()["healthy"], "a run")
    assert "Healthy: nothing stood out in 300 steps." in healthy
    assert "accuracy" in healthy
    assert "No diagnosis: not enough samples (1 of 20 steps)." in run_page(reports()["one step"], "a run")


def test_a_long_run_makes_no_larger_page() -> None:
    short, long = (len(run_page(report_of(make_traces("1 ms", steps=steps)), "a run")) for steps in (500, 20_000))
    assert long < 1.2 * short < 300_000


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

MEASURE = """<script>
addEventListener("error", (event) => { document.title = "error " + event.message; });
addEventListener("load", () => {
  const root = document.documentElement;
  const outside = [...document.querySelectorAll("main *")].filter((element) => {
    const box = element.getBoundingClientRect();
    return box.width && box.right > innerWidth + 1 && !element.closest(".scroll");
  });
  const ground = getComputedStyle(document.body).backgroundColor;
  const requests = performance.getEntriesByType("resource").length;
  document.title = ["measured", innerWidth, root.scrollWidth, outside.length, requests, ground].join("|");
});
</script>"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("case", ["everything", "hostile"])
def test_it_fits_the_window_in_a_browser(tmp_path: Path, case: str, width: int, scheme: str) -> None:
    if BROWSER is None:
        if os.environ.get("LIGHTNING_HPC_REQUIRE_BROWSER") == "1":
            pytest.fail("LIGHTNING_HPC_REQUIRE_BROWSER=1, but there is no Chromium on PATH")
        pytest.skip("no Chromium on PATH")
    # A window has a least width, a frame in it has none.
    frame = f'<iframe src="page_measured.html" style="width:{width}px;height:2000px;border:0"></iframe>'
    measured = run_page(reports()[case], "a run").replace("</head>", f"{MEASURE}</head>")
    measured = measured.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    (tmp_path / "page_measured.html").write_text(measured)
    reader = """<script>addEventListener("load", () => setTimeout(() => {
      document.title = frames[0].document.title; }, 200));</script>"""
    (tmp_path / "frame.html").write_text(f"<!DOCTYPE html><html><head>{reader}</head><body>{frame}</body></html>")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
    command = [
        *(BROWSER, *flags, "--disable-component-update", "--disable-sync", "--allow-file-access-from-files"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,2100", "--virtual-time-budget=5000"),
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
        *("--dump-dom", (tmp_path / "frame.html").as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>measured\|(.*?)</title>", done.stdout)
    assert found, (done.stdout[-500:], done.stderr[-1000:])
    inner, scroll, outside, requests, ground = found[1].split("|")
    assert (int(inner), int(outside), int(requests)) == (width, 0, 0)
    assert int(scroll) <= width
    brightness = sum(map(int, re.findall(r"\d+", ground)[:3]))
    assert (brightness < 200) == (scheme == "dark")
