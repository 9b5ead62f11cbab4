"""Results as pictures and pages that need no other file. Imports neither torch nor Lightning."""

from lightning_hpc.report.bar_chart import Bar, BarChart
from lightning_hpc.report.line_chart import LineChart

__all__ = ["Bar", "BarChart", "LineChart"]
