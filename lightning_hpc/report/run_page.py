"""A run's report as one page of HTML that needs no other file, no network and no script."""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from lightning_hpc.report.page import table
from lightning_hpc.report.plot import legend, stacked_bar
from lightning_hpc.report.run_charts import (
    comm_chart,
    histogram_chart,
    lane_charts,
    memory_charts,
    phases_chart,
    step_chart,
    throughput_chart,
)
from lightning_hpc.report.run_page_style import style
from lightning_hpc.report.run_report import RunReport
from lightning_hpc.trace.finding import Diagnosis, Finding

_PHASE_NAMES = {
    "data_prep": "wait for data",
    "h2d": "transfer",
    "schedule": "Lightning and callbacks",
    "forward": "forward",
    "backward": "backward",
    "comm": "exposed communication",
    "optimizer": "optimizer",
    "unattributed": "unattributed",
}
_MOST_LANES = 64
_MOST_METRIC_TILES = 8
_LONGEST_NAME = 60
# Whatever a file may bring in: nothing is loaded, nothing runs.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def run_page(report: RunReport, name: str) -> str:
    """The page.

    Args:
        report: What is shown.
        name: Of the run, for the title.
    """
    sections = (_header, _diagnosis, _tiles, _time, _steps, _ranks, _flow, _memory, _log, _environment)
    body = "".join(part for section in sections for part in section(report, name))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(name)}: run report</title>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>{style()}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _header(report: RunReport, name: str) -> Iterator[str]:
    started = f"{_utc(report.started_at)} UTC"
    ranks = f"{report.world_size} rank{'s' * (report.world_size != 1)}"
    devices = ", ".join(report.environment["devices"])
    yield f'<h1>{escape(name)}</h1>\n<p class="faint">{ranks} on {escape(devices)} · started {started}'
    yield f" · attempt {report.attempt}</p>\n" if len(report.attempts) > 1 else "</p>\n"
    if report.missing_ranks:
        missing = escape(_listed(map(str, report.missing_ranks), 12))
        yield f'<p class="faint">No trace was found of ranks {missing}; the figures are those of the others.</p>\n'


def _diagnosis(report: RunReport, name: str) -> Iterator[str]:
    diagnosis = report.diagnosis
    kind = "healthy" if diagnosis.is_healthy else "ill" if diagnosis.findings else ""
    yield f'<section class="card {kind}" aria-label="Diagnosis">\n'
    yield f'<p class="verdict">{escape(_verdict(diagnosis))}</p>\n'
    yield from map(_finding, diagnosis.findings)
    notes = "".join(f"<li>{escape(note)}</li>" for note in diagnosis.notes)
    yield f'<ul class="faint">{notes}</ul>\n</section>\n' if notes else "</section>\n"


def _verdict(diagnosis: Diagnosis) -> str:
    if diagnosis.is_healthy:
        return f"Healthy: nothing stood out in {diagnosis.steps:,} steps."
    if not diagnosis.findings:
        return f"No diagnosis: {diagnosis.headline}."
    first = diagnosis.findings[0]
    if first.rank is not None:
        return f"Rank {first.rank} is slow ({first.dimension}), which costs {first.share:.0%} of the time."
    subjects = {
        "data": "Waiting for data",
        "communication": "Waiting for the network",
        "framework": "Lightning, with callbacks, checkpoints and logs,",
    }
    who = subjects.get(first.dimension, first.dimension.capitalize())
    return f"{who} takes {first.share:.0%} of the time." if first.share else f"{who} is at risk."


def _finding(finding: Finding) -> str:
    title = finding.dimension if finding.rank is None else f"{finding.dimension} of rank {finding.rank}"
    return (
        f'<div class="finding"><h3>{escape(title.capitalize())} · {finding.share:.0%} of the time'
        f' <span class="faint">confidence {finding.confidence:.2f}</span></h3>\n'
        f'<div class="meter"><i style="width:{100 * finding.share:.1f}%"></i></div>\n'
        f"<p>{_marked(_sentence(finding.evidence))}</p>\n"
        f'<p class="try"><b>Try first:</b> {_marked(finding.first_try)}.</p></div>\n'
    )


def _marked(text: str) -> str:
    """Text with what stands in backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _tiles(report: RunReport, name: str) -> Iterator[str]:
    head = report.headline
    metrics = [
        (_cut(name), "not finite" if value is None else f"{value:.4g}") for name, value in report.metrics.items()
    ]
    tiles = [
        ("Step time", f"{_rounded(head.step_ms)} ms", f"median; P95 {_rounded(head.step_p95_ms)} ms"),
        ("Throughput", *_or_unknown(head.samples_per_second, "{}", "samples/s within steps, all ranks")),
        ("Peak memory", *_peak(head.peak_memory_bytes, head.peak_memory_share)),
        ("GPU utilization", *_or_unknown(head.gpu_utilization, "{:.0%}", "mean, as NVML says")),
        ("Exposed communication", *_or_unknown(head.comm_share, "{:.1%}", "of the steps' time")),
        ("End to end", _duration(head.wall_seconds), f"{head.steps:,} steps, {head.optimizer_steps:,} updates"),
        *((*metric, "last value") for metric in metrics[:_MOST_METRIC_TILES]),
    ]
    cells = "".join(
        f'<div class="tile"><small>{escape(title)}</small><b>{escape(value)}</b><span>{escape(note)}</span></div>'
        for title, value, note in tiles
    )
    yield f'<div class="tiles">{cells}</div>\n'
    if len(metrics) > _MOST_METRIC_TILES:
        yield _details("All metrics", _text_table(("metric", "last value"), metrics))


def _time(report: RunReport, name: str) -> Iterator[str]:
    total = sum(report.time_s.values()) or 1.0
    ordered = sorted(report.time_s.items(), key=lambda item: -item[1])
    parts = [(kind, f"{kind.replace('_', ' ')}: {_duration(seconds)}", seconds) for kind, seconds in ordered]
    yield "<section>\n<h2>Where the time of the run went</h2>\n<div class='card'>"
    yield stacked_bar("Time of the run by what it was spent on", parts, total)
    named = [(kind, f"{kind.replace('_', ' ')} {_duration(each)} ({each / total:.1%})") for kind, each in ordered]
    yield f"{legend(named)}</div>\n</section>\n"


def _steps(report: RunReport, name: str) -> Iterator[str]:
    series = report.series
    yield "<section>\n<h2>Steps</h2>\n"
    yield '<p class="faint">A point is a stretch of steps: their median as a line, fastest and slowest as a band.</p>\n'
    yield f'<div class="grid2">{step_chart(series)}{histogram_chart(series)}</div>\n'
    yield f'<div style="margin-top:14px">{phases_chart(series)}</div>\n'
    yield legend([(phase, _PHASE_NAMES[phase]) for phase, values in series.phases_ms.items() if any(values)])
    yield f"{_details('Phases as a table', _phase_table(report))}</section>\n"


def _phase_table(report: RunReport) -> str:
    means = {
        phase: sum(rank.phases_ms[phase] for rank in report.ranks) / len(report.ranks)
        for phase in _PHASE_NAMES
        if all(phase in rank.phases_ms for rank in report.ranks)
    }
    total = sum(means.values()) or 1.0
    rows = [(_PHASE_NAMES[phase], f"{mean:.3f} ms", f"{mean / total:.1%}") for phase, mean in means.items()]
    return table(("phase", "mean", "share"), rows)


def _ranks(report: RunReport, name: str) -> Iterator[str]:
    if len(report.ranks) < 2:
        return
    shown = report.ranks[:_MOST_LANES]
    yield "<section>\n<h2>Ranks</h2>\n<p class='faint'>What the steps of each rank consisted of, over the run, and"
    yield " their mean. Who waits shows it as communication (in backward, where that is not measured) or as Lightning's"
    yield " time; who is slow shows it in a phase of its own work.</p>\n<div class='card'>"
    for rank, lane in zip(shown, lane_charts([(f"Rank {each.rank}", each.lane) for each in shown]), strict=True):
        total = sum(max(each, 0.0) for each in rank.phases_ms.values())
        title = escape(f"rank {rank.rank} on {rank.host}")
        yield f'<div class="lane"><span title="{title}">rank {rank.rank}</span>{lane}<span>{total:.3g} ms</span></div>'
    if len(report.ranks) > _MOST_LANES:
        yield f"<p class='faint'>and {len(report.ranks) - _MOST_LANES} ranks more, in the JSON file</p>"
    present = [phase for phase in _PHASE_NAMES if any(rank.phases_ms.get(phase) for rank in report.ranks)]
    yield f"{legend([(phase, _PHASE_NAMES[phase]) for phase in present])}</div>\n</section>\n"


def _flow(report: RunReport, name: str) -> Iterator[str]:
    charts = [chart for chart in (throughput_chart(report.series), *comm_chart(report.series)) if chart]
    if charts:
        yield f'<section>\n<h2>Data and communication</h2>\n<div class="grid2">{"".join(charts)}</div>\n</section>\n'


def _memory(report: RunReport, name: str) -> Iterator[str]:
    charts = list(memory_charts(report.memory))
    yield "<section>\n<h2>Memory and utilization</h2>\n"
    if not charts:
        yield '<p class="faint">Not measured. Add MemoryMonitor() to the callbacks.</p>\n</section>\n'
        return
    names = [curve.name for curve in max(report.memory.values(), key=len)]
    yield f'<div class="grid2">{"".join(charts)}</div>\n'
    if len(names) > 1:
        yield legend([(f"rank{index}", each) for index, each in enumerate(names)])
    yield "</section>\n"


def _log(report: RunReport, name: str) -> Iterator[str]:
    if not report.decisions and not report.events:
        return
    yield "<section>\n<h2>Decisions and events</h2>\n"
    decisions = [
        (str(each["step"]), str(each["rank"]), "communication", f"{each['choice']}: {each['reason']}")
        for each in report.decisions
    ]
    events = [
        (str(each["step"]), str(each["rank"]), str(each["name"]), _listed_details(each["details"]))
        for each in report.events
    ]
    yield _scrolled(_text_table(("step", "rank", "what", "details"), decisions + events))
    yield "</section>\n"


def _environment(report: RunReport, name: str) -> Iterator[str]:
    rows = [(fact, _listed(values, 20)) for fact, values in report.environment.items()]
    yield f'<section>\n<h2>Environment</h2>\n<div class="scroll">{_text_table(("", ""), rows)}</div>\n'
    if len(report.attempts) > 1:
        attempts = [
            (str(each.attempt), _utc(each.started_at), f"{each.steps:,}", _duration(each.wall_seconds))
            for each in report.attempts[-50:]
        ]
        yield f"<h2>Attempts</h2>\n{_scrolled(table(('attempt', 'started (UTC)', 'steps', 'time'), attempts))}"
    yield "</section>\n"


def _text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th class="text">{escape(column)}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f'<td class="text">{escape(cell)}</td>' for cell in row) + "</tr>\n" for row in rows
    )
    return f"<table>\n<tr>{head}</tr>\n{body}</table>\n"


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{_scrolled(content)}</details>\n"


def _scrolled(content: str) -> str:
    return f'<div class="scroll">{content}</div>\n'


def _listed(values: Iterable[str], most: int) -> str:
    given = list(values)
    more = f" and {len(given) - most} more" if len(given) > most else ""
    return ", ".join(given[:most]) + more


def _listed_details(details: Any) -> str:
    if not isinstance(details, dict):
        return str(details)[:300]
    return _listed((f"{key} {_short(value)}" for key, value in details.items()), 12)


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:120]


def _or_unknown(value: float | None, form: str, note: str) -> tuple[str, str]:
    if value is None:
        return "n/a", "not measured"
    return form.format(_rounded(value) if form == "{}" else value), note


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _peak(count: float | None, share: float | None) -> tuple[str, str]:
    if count is None:
        return "n/a", "not measured"
    return _bytes(count), "of one rank" if share is None else f"{share:.0%} of the limit, at most"


def _bytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _utc(started_at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(min(max(started_at, 0.0), 2.0**37)))  # whatever the file says


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, _ = divmod(seconds, 60)
    return f"{minutes / 60:.1f} h" if minutes >= 120 else f"{minutes:.0f} min {seconds % 60:.0f} s"
