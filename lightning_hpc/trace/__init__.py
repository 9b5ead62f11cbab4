"""Records of where a step's time went: written, read and summed up. Imports neither torch nor Lightning."""

from lightning_hpc.trace.reader import Trace, TraceFileError, read_trace, read_traces
from lightning_hpc.trace.summary import PhaseSummary, TraceSummary, summarize

__all__ = ["PhaseSummary", "Trace", "TraceFileError", "TraceSummary", "read_trace", "read_traces", "summarize"]
