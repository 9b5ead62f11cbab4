"""One recording of `StepTrace`: from the set-up of a fit to its end."""

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_hpc.callbacks.batch_size import count_samples
from lightning_hpc.callbacks.comm_meter import CommMeter
from lightning_hpc.callbacks.cuda_marks import CudaMarks, IterationMarks
from lightning_hpc.callbacks.logger_spans import LoggerSpans
from lightning_hpc.callbacks.phase_profiler import PhaseProfiler
from lightning_hpc.trace.interval_means import IntervalMeans
from lightning_hpc.trace.marked_timeline import MarkedTimeline
from lightning_hpc.trace.records import decision_line, event_line, memory_line, span_line, step_line
from lightning_hpc.trace.step_table import WRITING
from lightning_hpc.trace.timeline import Phase, Span, Timeline
from lightning_hpc.trace.writer import TraceWriter

StepTimes = tuple[float | None, ...]
"""One iteration for listeners: milliseconds by phase, in the order of `lightning_hpc.trace.records.PHASES`
(communication is None where unknown), in total, then the indices of epoch and batch. What is written to checkpoints
and loggers within the iteration counts as ``schedule`` here."""

_BACKWARD = int(Phase.BACKWARD)
# Lines are formatted and written so often, since a few at once cost a third of what each costs between two steps.
_FLUSH_NS = 50_000_000


def is_timed_by_marks(device: torch.device) -> bool:
    """Whether phases are timed on the device, which works by itself, rather than by the host's clock."""
    return device.type == "cuda"


class _Step(NamedTuple):
    """An iteration that waits to be written: what `step_line` takes, time within it for what is written, and marks."""

    charged_ns: list[int]
    comm_ns: int | None
    total_ns: int
    step: int
    batch: int
    epoch: int
    optimizer_steps: int
    samples: int | None
    start_ns: int
    comm_bytes: int | None
    writing_ns: int
    marks: IterationMarks | None


class StepRecorder:
    """Turns what a timeline hands out into records, console lines and metrics. In place from construction to `close`.

    Args:
        trainer: The Trainer, whose profiler is wrapped.
        writer: Where the records go. Closed by `close`.
        console: Whether this rank prints lines.
        silent_prefix: Start of the action names of the callback that this recorder belongs to.
        since_ns: When the header's ``started_at`` was read, as `time.perf_counter_ns` says.

    Attributes:
        listeners: Called with the times of each iteration.
    """

    def __init__(
        self, trainer: pl.Trainer, writer: TraceWriter, console: bool, silent_prefix: str, since_ns: int
    ) -> None:
        self._trainer = cast(Any, trainer)  # it gets some of its attributes where mypy does not look
        self._writer: TraceWriter | None = writer
        self._console = console
        self._interval = int(self._trainer.log_every_n_steps)
        self._means = IntervalMeans() if trainer.is_global_zero and self._interval > 0 else None
        self._comm: CommMeter | None = None
        self._rank = trainer.global_rank
        self._batch = self._step = self._step_before = 0
        self._samples: int | None = None
        self._writing_ns = 0
        self._steps: list[_Step] = []
        self._finished: list[_Step] = []
        self._flushed_at_ns = 0
        self.listeners: list[Callable[[StepTimes], None]] = []
        device = trainer.strategy.root_device
        self._marks = CudaMarks(device) if is_timed_by_marks(device) else None
        self._timeline = self._make_timeline(since_ns)
        self._user_profiler = self._trainer.profiler
        self._profiler = PhaseProfiler(self._user_profiler, self._timeline, trainer, silent_prefix)
        self._trainer.profiler = self._profiler
        self._logger_spans = LoggerSpans(trainer.loggers, self._timeline)

    def _make_timeline(self, since_ns: int) -> Timeline:
        to_do = (time.perf_counter_ns, self._record_step, self._record_span, since_ns)
        return Timeline(*to_do) if self._marks is None else MarkedTimeline(*to_do, self._marks.mark)

    def start_training(self) -> None:
        """Takes the figures from which the first iteration counts, after a checkpoint has been restored."""
        self._step_before = self._trainer.global_step
        self._comm = CommMeter(self._trainer.strategy, self._trainer.world_size)

    def start_backward(self) -> None:
        """A backward that no action announces begins."""
        self._timeline.push(int(Phase.BACKWARD))

    def stop_backward(self) -> None:
        """It has ended."""
        self._timeline.pop()

    def finish_batch(self, batch: Any, batch_idx: int) -> None:
        """The training of a batch is finished."""
        # Read here: when the iteration ends, a loop whose step does the fetching is one batch further.
        self._batch = batch_idx
        self._step = self._trainer.global_step
        self._samples = count_samples(batch)
        self._timeline.finish_batch()

    def write_memory(self, figures: Mapping[str, float | None]) -> None:
        """Writes a reading of memory."""
        where = {"step": self._trainer.global_step, "epoch": self._timeline.epoch or 0, "batch": self._batch}
        self._write(memory_line(figures, **where, rank=self._rank, at_ns=self._timeline.elapsed_ns))

    def write_event(self, name: str, details: Mapping[str, Any]) -> None:
        """Writes something that happened."""
        step = self._trainer.global_step
        self._write(event_line(name, details, step=step, rank=self._rank, at_ns=self._timeline.elapsed_ns))

    def close(self) -> None:
        """Gives the Trainer its profiler back, and writes what is left."""
        # Somebody may have wrapped ours in turn, and then has to undo that.
        if self._trainer.profiler is self._profiler:
            self._trainer.profiler = self._user_profiler
        self._logger_spans.close()
        self._timeline.close()
        self._finish_steps(wait=True)
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _record_step(self, charged_ns: list[int], start_ns: int, total_ns: int) -> None:
        assert self._comm is not None
        assert self._timeline.epoch is not None
        comm_ns, comm_bytes = self._comm.read()
        optimizer_steps = self._step - self._step_before
        self._step_before = self._step
        where = (self._step, self._batch, self._timeline.epoch, optimizer_steps, self._samples, start_ns)
        marks = None if self._marks is None else self._marks.cut()
        writing_ns, self._writing_ns = self._writing_ns, 0
        self._steps.append(_Step(charged_ns, comm_ns, total_ns, *where, comm_bytes, writing_ns, marks))
        for decision in self._comm.take_decisions():
            self._write(decision_line(rank=self._rank, **dataclasses.asdict(decision)))
        if self.listeners or self._marks is not None:
            self._finish_steps()
        ended_ns = start_ns + total_ns
        if ended_ns - self._flushed_at_ns >= _FLUSH_NS or self._is_interval_full():
            self._flushed_at_ns = ended_ns
            self._flush()

    def _is_interval_full(self) -> bool:
        if self._means is None:
            return False
        return self._means.count + len(self._finished) + len(self._steps) >= self._interval

    def _finish_steps(self, *, wait: bool = False) -> None:
        """Completes the iterations that the device has passed, in their order."""
        while self._steps:
            step = self._steps[0]
            if step.marks is not None:
                times = self._read(step.marks, wait)
                if times is None:
                    return
                step = step._replace(charged_ns=times[0], total_ns=times[1])
            del self._steps[0]
            if step.comm_ns:
                # What was waited for has passed within backward, as far as this rank can tell.
                step.charged_ns[_BACKWARD] = max(step.charged_ns[_BACKWARD] - step.comm_ns, 0)
            self._finished.append(step)
            for listener in self.listeners:
                listener(_times_of(step))

    def _read(self, marks: IterationMarks, wait: bool) -> tuple[list[int], int] | None:
        try:
            if wait:
                marks.wait()
            return marks.read() if wait or marks.has_passed() else None
        except RuntimeError as error:  # a device that has failed
            lost = f"the last {len(self._steps)} iterations of rank {self._rank} are not in the trace"
            warnings.warn(f"{lost}, since their times cannot be read: {error}", RuntimeWarning, stacklevel=2)
            self._steps.clear()
            return None

    def _flush(self) -> None:
        self._finish_steps()
        steps, self._finished = self._finished, []
        if steps:
            self._append(b"".join([self._line_of(step) for step in steps]))
        for step in steps:
            self._add_to_means(step)

    def _add_to_means(self, step: _Step) -> None:
        if self._means is None:
            return
        self._means.add(step.charged_ns, step.comm_ns, step.total_ns, step.samples)
        if self._means.count >= self._interval:
            means, self._means = self._means, IntervalMeans()
            self._publish(means, step.step)

    def _line_of(self, step: _Step) -> bytes:
        return step_line(
            step.charged_ns,
            step.comm_ns,
            step.total_ns,
            step=step.step,
            batch=step.batch,
            epoch=step.epoch,
            rank=self._rank,
            optimizer_steps=step.optimizer_steps,
            samples=step.samples,
            start_ns=step.start_ns,
            comm_bytes=step.comm_bytes,
        )

    def _record_span(self, span: Span) -> None:
        if span.name in WRITING and span.parent is None:
            self._writing_ns += span.duration_ns
        self._write(span_line(span, self._rank))

    def _write(self, line: bytes) -> None:
        """Appends a line behind those of the iterations so far."""
        self._flush()
        self._append(line)

    def _append(self, lines: bytes) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(lines)
        except OSError as error:
            # A full disk must not end the training that the trace is about.
            warnings.warn(f"StepTrace of rank {self._rank} stops: {error}", RuntimeWarning, stacklevel=2)
            self._writer.close()
            self._writer = None

    def _publish(self, means: IntervalMeans, step: int) -> None:
        if self._console:
            self._print(means.line())
        metrics = {f"step_trace/{name}": value for name, value in means.metrics().items()}
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics, step=step)

    def _print(self, line: str) -> None:
        progress_bar = self._trainer.progress_bar_callback
        if progress_bar is None:
            rank_zero_info(line)
        else:
            progress_bar.print(line)


def _times_of(step: _Step) -> StepTimes:
    data_prep, h2d, schedule, forward, backward, optimizer = (ns / 1e6 for ns in step.charged_ns)
    comm = None if step.comm_ns is None else step.comm_ns / 1e6
    unattributed = (step.total_ns - sum(step.charged_ns) - (step.comm_ns or 0)) / 1e6
    writing = step.writing_ns / 1e6
    times = (data_prep, h2d, schedule + writing, forward, backward, comm, optimizer, unattributed)
    return (*times, step.total_ns / 1e6 + writing, step.epoch, step.batch)
