"""Runs the stages of a pipeline at once: on one thread a stage (CPU) or on one CUDA stream a stage."""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from lightning_hpc.comm.slices import Slice

_LOOK_UP = timedelta(milliseconds=200)
"""How often a waiting thread looks whether the pipeline was closed; it learns at once that its work is done."""


class Stage(Protocol):
    """One step of a slice's way: a collective, and what is to be done with its outcome.

    Works in place; `str` of it names the step in errors.

    Attributes:
        ranks: Who takes part.
        depth: Number of slices that may be started before the first of them is finished. With more than one, slices are
            started in one thread and finished in another one.
    """

    ranks: tuple[int, ...]
    depth: int = 1

    def start(self, item: Slice) -> dist.Work | None:
        """Issues the collective; None if this rank has no part in it for this slice."""

    def finish(self, item: Slice) -> None:
        """Uses what the collective has brought. Called once its work is done, or its stream waits for it."""


class Pipeline(Protocol):
    """Sends the slices of tensors through all stages, in the order of submission at every stage."""

    def submit(self, slices: Sequence[Slice], tensor: Tensor) -> Future[Tensor]:
        """Starts the work. The future holds ``tensor`` once all its slices have passed all stages."""

    def close(self) -> bool:
        """Ends the pipeline; futures of work still under way complete with an error.

        Returns:
            Whether no collective was left unfinished.
        """


class CommunicationError(RuntimeError):
    """A collective failed on this rank, or an earlier one did and the ranks are out of step."""


@dataclass
class _Job:
    tensor: Tensor
    future: Future[Any] = field(default_factory=Future)  # of the tensor, or of an error


_Started = tuple[tuple[Slice, bool], "dist.Work | None"]


class ThreadPipeline(Pipeline):
    """One thread, or two, and one FIFO queue a stage; for CPU tensors and gloo.

    A stage waits in its own thread, never in a future's callback: gloo runs those on a few threads that the collectives
    need themselves, so that waiting there deadlocks (pytorch#48478). When a stage raises, the futures of everything
    under way complete with a `CommunicationError`, and so does all that is submitted later: peers that did not see the
    error are at another place by then.

    `close` also ends a thread whose collective waits for a peer that will never come. Left behind in C++, such a thread
    would ask for the interpreter while that shuts down, which aborts the process.

    Args:
        stages: The steps, in order.
        explain: Asked for a sentence more on what has failed at a stage.
    """

    def __init__(self, stages: Sequence[Stage], explain: Callable[[Stage, str], str] | None = None) -> None:
        assert stages, "a pipeline without stages reduces nothing"
        self._explain = explain
        self._lock = threading.Lock()
        self._under_way: deque[_Job] = deque()  # guarded by the lock, as is the next one
        self._error: CommunicationError | None = None
        self._closed = False
        self._unfinished = False
        self._queues = [queue.SimpleQueue[tuple[Slice, bool] | None]() for _ in stages]
        self._threads = [thread for index, stage in enumerate(stages) for thread in self._make_threads(index, stage)]
        for thread in self._threads:
            thread.start()

    @override
    def submit(self, slices: Sequence[Slice], tensor: Tensor) -> Future[Tensor]:
        job = _Job(tensor)
        with self._lock:
            error = self._error
            if error is None and slices:
                self._under_way.append(job)
        if error is not None:
            job.future.set_exception(error)
        elif not slices:
            job.future.set_result(tensor)
        for index, item in enumerate(slices):
            self._queues[0].put((item, index == len(slices) - 1))
        return job.future

    @override
    def close(self) -> bool:
        self._closed = True
        self._fail(CommunicationError("the all-reduce was closed while it was under way"))
        for stage_queue in self._queues:
            stage_queue.put(None)
        for thread in self._threads:
            thread.join()
        return not self._unfinished

    def _make_threads(self, index: int, stage: Stage) -> list[threading.Thread]:
        started: queue.SimpleQueue[_Started | None] = queue.SimpleQueue()
        free = threading.Semaphore(stage.depth)
        targets: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(self._work, (index, stage))]
        if stage.depth > 1:
            targets = [
                (self._start_slices, (index, stage, started, free)),
                (self._finish_slices, (index, stage, started, free)),
            ]
        return [threading.Thread(target=run, args=args, name=f"hpc {stage}", daemon=True) for run, args in targets]

    def _work(self, index: int, stage: Stage) -> None:
        """A stage that has one slice under way."""
        while (entry := self._queues[index].get()) is not None:
            self._end(index, stage, entry, self._begin(stage, entry[0]))

    def _start_slices(
        self, index: int, stage: Stage, started: "queue.SimpleQueue[_Started | None]", free: threading.Semaphore
    ) -> None:
        while (entry := self._queues[index].get()) is not None:
            free.acquire()
            started.put((entry, self._begin(stage, entry[0])))
        started.put(None)

    def _finish_slices(
        self, index: int, stage: Stage, started: "queue.SimpleQueue[_Started | None]", free: threading.Semaphore
    ) -> None:
        while (both := started.get()) is not None:
            self._end(index, stage, *both)
            free.release()

    def _begin(self, stage: Stage, item: Slice) -> dist.Work | None:
        if self._error is None:
            try:
                return stage.start(item)
            except BaseException as error:
                self._fail(self._failure(stage, item, error))
        return None

    def _end(self, index: int, stage: Stage, entry: tuple[Slice, bool], work: dist.Work | None) -> None:
        item, is_last_slice = entry
        try:
            # What was started has to end, whatever went wrong since: its memory is in use until then.
            is_done = work is None or self._wait(work)
            if not is_done or self._error is not None:
                return
            stage.finish(item)
        except BaseException as error:
            self._fail(self._failure(stage, item, error))
            return
        if index + 1 < len(self._queues):
            self._queues[index + 1].put(entry)
        elif is_last_slice:
            self._finish()

    def _wait(self, work: dist.Work) -> bool:
        """Waits until the work is done, raising its error, or the pipeline is closed; returns whether it is done."""
        while True:
            try:
                work.wait(_LOOK_UP)
                return True
            except RuntimeError:
                if work.is_completed():
                    # Either it has failed, or it was done just after our short wait was over: this raises, or returns.
                    work.wait()
                    return True
                if self._closed:
                    self._unfinished = True
                    return False

    def _failure(self, stage: Stage, item: Slice, error: BaseException) -> CommunicationError:
        what = f"{stage} failed in {item}: {error}"
        explanation = ""
        # Only the first failure has something to tell: the others follow from it. Whatever goes wrong in the telling,
        # those who wait for the futures must get their error.
        with contextlib.suppress(Exception):
            if self._explain is not None and self._error is None:
                explanation = f". {self._explain(stage, what)}"
        failure = CommunicationError(what + explanation)
        failure.__cause__ = error
        return failure

    def _finish(self) -> None:
        """Completes the oldest job. Whoever takes a job out of the queue completes its future, so that is done once."""
        with self._lock:
            job = self._under_way.popleft() if self._under_way else None
        if job is not None:
            job.future.set_result(job.tensor)

    def _fail(self, error: CommunicationError) -> None:
        with self._lock:
            self._error = self._error or error
            jobs = list(self._under_way)
            self._under_way.clear()
        for job in jobs:
            job.future.set_exception(self._error)


class StreamPipeline(Pipeline):
    """One CUDA stream a stage, events between them; for CUDA tensors and NCCL. The CPU never waits.

    All is issued from the caller's thread, slice by slice and stage by stage, so that every rank issues the collectives
    of all groups in the same order, as NCCL asks for.

    Args:
        stages: The steps, in order.
        device: The CUDA device of all tensors.
    """

    def __init__(self, stages: Sequence[Stage], device: torch.device) -> None:
        assert stages, "a pipeline without stages reduces nothing"
        self._stages = stages
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in stages]

    @override
    def submit(self, slices: Sequence[Slice], tensor: Tensor) -> Future[Tensor]:
        computed = torch.cuda.current_stream(self._device).record_event()
        for stream in self._streams:
            # Also where there are no slices: the future below must not be ahead of the computation.
            stream.wait_event(computed)
        for item in slices:
            passed = computed
            for stage, stream in zip(self._stages, self._streams, strict=True):
                stream.wait_event(passed)
                with torch.cuda.stream(stream):
                    for temporary in item.temporaries:
                        # Its memory belongs to the stream that it was made on, whose next work must not get it while
                        # this one still uses it, though Python may be done with it long before.
                        temporary.record_stream(stream)
                    work = stage.start(item)
                    if work is not None:
                        work.wait()  # the stream waits, the CPU goes on
                    stage.finish(item)
                passed = stream.record_event()
        future: Future[Tensor] = Future(devices=[self._device])
        with torch.cuda.stream(self._streams[-1]):
            # The future records this stream's event: whoever waits for it makes its own stream wait for the last stage.
            future.set_result(tensor)
        return future

    @override
    def close(self) -> bool:
        """Nothing to end: the streams' work is bounded by NCCL's own time-out."""
        return True
