"""One recording of `StepTrace`: from the set-up of a fit to its end."""

import dataclasses
import time
import warnings
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_hpc.callbacks.comm_meter import CommMeter
from lightning_hpc.callbacks.phase_profiler import PhaseProfiler
from lightning_hpc.trace.console import ConsoleMeans
from lightning_hpc.trace.records import decision_line, span_line, step_line
from lightning_hpc.trace.timeline import Phase, Span, Timeline
from lightning_hpc.trace.writer import TraceWriter


class StepRecorder:
    """Turns what a timeline hands out into records and console lines. In place from construction to `close`.

    Args:
        trainer: The Trainer, whose profiler is wrapped.
        writer: Where the records go. Closed by `close`.
        console: Whether this rank prints lines.
        silent_prefix: Start of the action names of the callback that this recorder belongs to.
    """

    def __init__(self, trainer: pl.Trainer, writer: TraceWriter, console: bool, silent_prefix: str) -> None:
        self._trainer = cast(Any, trainer)  # it gets some of its attributes where mypy does not look
        self._writer: TraceWriter | None = writer
        self._console = ConsoleMeans() if console and self._trainer.log_every_n_steps > 0 else None
        self._comm: CommMeter | None = None
        self._rank = trainer.global_rank
        self._batch = self._step = self._step_before = 0
        self._timeline = Timeline(time.perf_counter_ns, self._record_step, self._record_span)
        self._user_profiler = self._trainer.profiler
        self._profiler = PhaseProfiler(self._user_profiler, self._timeline, trainer, silent_prefix)
        self._trainer.profiler = self._profiler

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

    def finish_batch(self, batch_idx: int) -> None:
        """The training of a batch is finished."""
        # Read here: when the iteration ends, a loop whose step does the fetching is one batch further.
        self._batch = batch_idx
        self._step = self._trainer.global_step
        self._timeline.finish_batch()

    def close(self) -> None:
        """Gives the Trainer its profiler back, and writes what is left."""
        # Somebody may have wrapped ours in turn, and then has to undo that.
        if self._trainer.profiler is self._profiler:
            self._trainer.profiler = self._user_profiler
        self._timeline.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _record_step(self, charged_ns: list[int], total_ns: int) -> None:
        assert self._comm is not None
        assert self._timeline.epoch is not None
        comm_ns, comm_bytes = self._comm.read()
        # What was waited for has passed within backward, as far as this rank's clock can tell.
        charged_ns[Phase.BACKWARD] = max(charged_ns[Phase.BACKWARD] - (comm_ns or 0), 0)
        line = step_line(
            charged_ns,
            comm_ns,
            total_ns,
            step=self._step,
            batch=self._batch,
            epoch=self._timeline.epoch,
            rank=self._rank,
            optimizer_steps=self._step - self._step_before,
            comm_bytes=comm_bytes,
        )
        self._step_before = self._step
        self._write(line)
        for decision in self._comm.take_decisions():
            self._write(decision_line(rank=self._rank, **dataclasses.asdict(decision)))
        if self._console is not None:
            self._console.add(charged_ns, comm_ns)
            if self._console.count >= self._trainer.log_every_n_steps:
                self._print(self._console.line())
                self._console = ConsoleMeans()

    def _record_span(self, span: Span) -> None:
        self._write(span_line(span, self._rank))

    def _write(self, line: bytes) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(line)
        except OSError as error:
            # A full disk must not end the training that the trace is about.
            warnings.warn(f"StepTrace of rank {self._rank} stops: {error}", RuntimeWarning, stacklevel=2)
            self._writer.close()
            self._writer = None

    def _print(self, line: str) -> None:
        progress_bar = self._trainer.progress_bar_callback
        if progress_bar is None:
            rank_zero_info(line)
        else:
            progress_bar.print(line)
