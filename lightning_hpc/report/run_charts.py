"""The charts of a run's page."""

from collections.abc import Iterator, Mapping, Sequence

from lightning_hpc.report.axis import Axis
from lightning_hpc.report.plot import Plot, Shape, area, bar, polyline, strip
from lightning_hpc.report.run_series import Curve, Lane, RunSeries

_TIME = "seconds since the start"
_MIB = 2**20
_MANY_STRETCHES = 20
_MEMORY_TITLES = {
    "memory_used_bytes": ("Memory in use", "MiB", 1 / _MIB),
    "memory_reserved_bytes": ("Reserved by the allocator", "MiB", 1 / _MIB),
    "gpu_used_bytes": ("In use on the GPU, all processes", "MiB", 1 / _MIB),
    "gpu_utilization": ("GPU utilization", "%", 100.0),
    "memory_hit_rate": ("Allocations served by the cache", "%", 100.0),
    "memory_fragmentation": ("Fragmentation", "% of what is reserved", 100.0),
}


def step_chart(series: RunSeries) -> str:
    """The iteration over time."""
    return _curve_chart("Step time", "ms", series.step_ms)


def throughput_chart(series: RunSeries) -> str:
    """Samples a second of all ranks; empty where batches did not say."""
    return "" if series.throughput is None else _curve_chart("Throughput", "samples/s, all ranks", series.throughput)


def comm_chart(series: RunSeries) -> Iterator[str]:
    """Exposed communication, and bytes sent, where there was any."""
    comm = series.phases_ms.get("comm")
    if comm is not None and any(comm):
        yield _lines_chart("Exposed communication", "ms a step", series.phase_times_s, [("comm", list(comm))])
    if series.comm_bytes is not None and any(series.comm_bytes.high):
        scaled = _scaled(series.comm_bytes, 1e-6)
        yield _curve_chart("Gradients sent by a rank", "MB a step", scaled)


def histogram_chart(series: RunSeries) -> str:
    """The distribution of the iteration."""
    edges, counts = series.step_histogram.edges_ms, series.step_histogram.counts
    x, y = Axis.between(edges[0], edges[-1]), Axis.linear(counts, most=4)
    shapes = [
        Shape("bar", bar(x, y, left, right, count), f"{left:.3g} to {right:.3g} ms: {count} steps")
        for left, right, count in zip(edges, edges[1:], counts, strict=False)
        if count
    ]
    total = sum(counts)
    summary = f"{total} steps between {edges[0]:.3g} and {edges[-1]:.3g} milliseconds"
    x_unit = "ms; the last bar also has what took longer"
    return Plot("Distribution of the step time", "steps", x_unit, x, y, shapes, summary).draw()


def phases_chart(series: RunSeries) -> str:
    """The phases, stacked over time."""
    times = series.phase_times_s
    x = Axis.between(times[0], times[-1])
    tops = [sum(max(value, 0.0) for value in values) for values in zip(*series.phases_ms.values(), strict=True)]
    y = Axis.linear(_usual(tops), most=4)
    shapes = _stacked(x, y, times, series.phases_ms)
    summary = "; ".join(shape.tip for shape in shapes)
    return Plot("What a step consists of", "ms, mean of the ranks", _TIME, x, y, shapes, summary).draw()


def lane_charts(lanes: Sequence[tuple[str, Lane]]) -> Iterator[str]:
    """The lane of each rank: its phases stacked over time, all to the same scale."""
    first = min(lane.times_s[0] for _, lane in lanes)
    last = max(lane.times_s[-1] for _, lane in lanes)
    x = Axis.between(first, last)
    heights = [sum(max(value, 0.0) for value in values) for _, lane in lanes for values in _by_stretch(lane)]
    y = Axis.linear(sorted(heights)[: -(-len(heights) * 98 // 100)], most=2)  # a first step leaves no room else
    for name, lane in lanes:
        mean = sum(sum(values) / len(values) for values in lane.phases_ms.values())
        yield strip(f"{name}: {mean:.3g} ms a step in the mean", _stacked(x, y, lane.times_s, lane.phases_ms))


def _by_stretch(lane: Lane) -> Iterator[tuple[float, ...]]:
    return zip(*lane.phases_ms.values(), strict=True)


def _stacked(x: Axis, y: Axis, times: Sequence[float], phases: Mapping[str, Sequence[float]]) -> list[Shape]:
    """The phases as areas on top of each other."""
    below = [0.0] * len(times)
    shapes = []
    for phase, values in phases.items():
        above = [low + max(value, 0.0) for low, value in zip(below, values, strict=True)]
        if any(values):
            tip = f"{phase}: {sum(values) / len(values):.3g} ms in the mean"
            shapes.append(Shape(phase, area(x, y, times, below, above), tip))
        below = above
    return shapes


def memory_charts(curves: Mapping[str, Sequence[Curve]]) -> Iterator[str]:
    """A chart of each figure that was measured, with a line a rank."""
    for figure, (title, unit, scale) in _MEMORY_TITLES.items():
        if figure not in curves:
            continue
        lines = [(f"rank{index}", _scaled(curve, scale)) for index, curve in enumerate(curves[figure])]
        limits = [_scaled(curve, scale) for curve in curves.get("memory_limit_bytes", ())]
        yield _ranks_chart(title, unit, lines, limits if figure == "memory_used_bytes" else [])


def _ranks_chart(title: str, unit: str, lines: Sequence[tuple[str, Curve]], limits: Sequence[Curve]) -> str:
    curves = [curve for _, curve in lines]
    x = Axis.between(min(curve.times_s[0] for curve in curves), max(curve.times_s[-1] for curve in curves))
    top = max(max(_present(curve.high)) for curve in curves)
    # A limit that is far away would leave no room for what is below.
    near = [curve for curve in limits if max(_present(curve.high)) <= 3 * top]
    y = Axis.linear([top, *(max(_present(curve.high)) for curve in near)], most=4)
    shapes = [Shape("limit", polyline(x, y, curve.times_s, curve.middle), f"limit of {curve.name}") for curve in near]
    shapes += [
        Shape(kind, polyline(x, y, curve.times_s, curve.high), f"{curve.name}: {max(_present(curve.high)):.4g} at most")
        for kind, curve in lines
    ]
    summary = "; ".join(f"{curve.name}: at most {max(_present(curve.high)):.4g}" for curve in curves)
    return Plot(title, unit + (", with its limit" if near else ""), _TIME, x, y, shapes, summary).draw()


def _curve_chart(title: str, unit: str, curve: Curve) -> str:
    high = _present(curve.high)
    x, y = Axis.between(curve.times_s[0], curve.times_s[-1]), Axis.linear(_usual(high), most=4)
    low = [value or 0.0 for value in curve.low]
    middle = _present(curve.middle)
    shapes = [
        Shape("band", area(x, y, curve.times_s, low, [value or 0.0 for value in curve.high]), "fastest to slowest"),
        Shape("line", polyline(x, y, curve.times_s, curve.middle), "median of each stretch"),
    ]
    summary = f"Medians from {min(middle):.3g} to {max(middle):.3g}, the highest value is {max(high):.3g}"
    return Plot(title, unit, _TIME, x, y, shapes, summary).draw()


def _lines_chart(title: str, unit: str, times: Sequence[float], lines: Sequence[tuple[str, list[float]]]) -> str:
    x, y = Axis.between(times[0], times[-1]), Axis.linear([max(values) for _, values in lines], most=4)
    zero = [0.0] * len(times)
    shapes = [Shape(kind, area(x, y, times, zero, values)) for kind, values in lines]
    summary = f"At most {max(max(values) for _, values in lines):.3g}"
    return Plot(title, unit, _TIME, x, y, shapes, summary).draw()


def _usual(values: Sequence[float]) -> Sequence[float]:
    """Without the first steps, which would leave the others no room: what is higher is cut, and is in the text."""
    return values[1:] if len(values) >= _MANY_STRETCHES else values


def _scaled(curve: Curve, factor: float) -> Curve:
    parts = (
        tuple(None if value is None else value * factor for value in values)
        for values in (curve.low, curve.middle, curve.high)
    )
    return Curve(curve.name, curve.times_s, *parts)


def _present(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
