"""Records of where a step's time went: written, read and explained. Imports neither torch nor Lightning."""

from lightning_hpc.trace.diagnosis import diagnose
from lightning_hpc.trace.finding import Diagnosis, Finding, render
from lightning_hpc.trace.reader import Trace, TraceFileError, read_trace, read_traces
from lightning_hpc.trace.summary import PhaseSummary, TraceSummary, summarize

__all__ = [
    "Diagnosis",
    "Finding",
    "PhaseSummary",
    "Trace",
    "TraceFileError",
    "TraceSummary",
    "diagnose",
    "read_trace",
    "read_traces",
    "render",
    "summarize",
]
