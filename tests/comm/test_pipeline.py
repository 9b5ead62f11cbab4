"""Order, completion and failure of the executors; the CUDA one with recording fakes of streams and events."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.futures import Future

from lightning_hpc.comm import pipeline
from lightning_hpc.comm.layout import Grain, ParameterSpec, codec_slices, exact_slices
from lightning_hpc.comm.pipeline import CommunicationError, StreamPipeline, ThreadPipeline
from lightning_hpc.comm.slices import Slice, SlicePlan


class Local:
    """A stage without a collective."""

    ranks = (0,)

    def __init__(self, function: Callable[[Any], Any], depth: int = 1) -> None:
        self.function, self.depth = function, depth

    def start(self, shards: Any) -> None:
        return None

    def finish(self, shards: Any) -> None:
        self.function(shards)


class Numbered(list[torch.Tensor]):
    """In place of a slice: all that the executors ask of it."""

    temporaries = ()


def slices(*values: int) -> list[Any]:
    return [Numbered([torch.tensor(value)]) for value in values]


def test_every_stage_sees_the_slices_in_order_and_the_future_comes_last() -> None:
    seen: dict[str, list[int]] = {"first": [], "second": []}
    threads = ThreadPipeline([Local(lambda shards, name=name: seen[name].append(int(shards[0]))) for name in seen])
    tensors = [torch.zeros(1), torch.ones(1)]
    futures = [threads.submit(slices(0, 1, 2), tensors[0]), threads.submit(slices(3), tensors[1])]
    assert futures[1].wait() is tensors[1]
    assert futures[0].done()
    assert seen == {"first": [0, 1, 2, 3], "second": [0, 1, 2, 3]}
    threads.close()


def test_stages_work_at_once() -> None:
    # The first stage's second slice can only start while the second stage still holds the first slice.
    overlapped = threading.Event()

    def first(shards: Any) -> None:
        if int(shards[0]) == 1:
            overlapped.set()

    def second(shards: Any) -> None:
        assert overlapped.wait(timeout=30)

    threads = ThreadPipeline([Local(first), Local(second)])
    threads.submit(slices(0, 1), torch.zeros(1)).wait()
    threads.close()


def test_a_tensor_without_elements_is_done_at_once() -> None:
    threads = ThreadPipeline([Local(lambda shards: None)])
    empty = torch.zeros(0)
    assert threads.submit([], empty).wait() is empty
    threads.close()


def test_an_error_reaches_everything_under_way_and_all_that_follows() -> None:
    release = threading.Event()

    def fail(shards: Any) -> None:
        release.wait(timeout=30)
        raise ValueError("planted")

    threads = ThreadPipeline([Local(fail), Local(lambda shards: None)])
    futures = [threads.submit(slices(0), torch.zeros(1)), threads.submit(slices(1), torch.zeros(1))]
    release.set()
    for future in futures:
        with pytest.raises(CommunicationError, match="planted"):
            future.wait()
    with pytest.raises(CommunicationError, match="planted"):
        threads.submit(slices(2), torch.zeros(1)).wait()
    threads.close()


class Counting(Local):
    """A stage whose slices end in their order, each only when the next one was started or there is none."""

    def __init__(self, count: int, depth: int) -> None:
        super().__init__(self.end, depth)
        self.left, self.started, self.ended = count, 0, 0
        self.most, self.next_started = 0, [threading.Event() for _ in range(count + 1)]

    def start(self, shards: Any) -> Any:
        self.next_started[self.started].set()
        self.started += 1
        self.most = max(self.most, self.started - self.ended)
        return self

    def wait(self, timeout: timedelta) -> None:
        following = self.ended + self.depth - 1
        if following < self.left and not self.next_started[following].wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False

    def end(self, shards: Any) -> None:
        self.ended += 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stage_starts_as_many_slices_as_it_is_deep_before_the_first_ends(depth: int) -> None:
    stage, order = Counting(8, depth), []
    pipeline = ThreadPipeline([stage, Local(lambda shards: order.append(int(shards[0])))])
    futures = [pipeline.submit(slices(value), torch.tensor(value)) for value in range(8)]
    assert [int(future.wait()) for future in futures] == list(range(8))
    assert pipeline.close()
    assert order == list(range(8))
    assert stage.most == depth


class Endless(Local):
    """A stage whose collective waits for a peer that never comes, like gloo's `Work`."""

    def __init__(self) -> None:
        super().__init__(lambda shards: None)
        self.waiting = threading.Event()

    def start(self, shards: Any) -> Any:
        return self

    def wait(self, timeout: timedelta) -> None:
        self.waiting.set()
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


class DoneJustAfterTheWait(Local):
    """A stage whose collective ends between our look-up and the question whether it is done."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(lambda shards: None)
        self.error = error

    def start(self, shards: Any) -> Any:
        return self

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return True


def test_work_that_is_done_just_after_a_look_up_is_no_error() -> None:
    threads = ThreadPipeline([DoneJustAfterTheWait(error=None)])
    tensor = torch.zeros(1)
    assert threads.submit(slices(0), tensor).wait() is tensor
    assert threads.close()


def test_work_that_fails_just_after_a_look_up_gives_its_own_error() -> None:
    threads = ThreadPipeline([DoneJustAfterTheWait(RuntimeError("connection closed by peer"))])
    with pytest.raises(CommunicationError, match="connection closed by peer"):
        threads.submit(slices(0), torch.zeros(1)).wait()
    threads.close()


def test_close_ends_a_thread_whose_peer_never_comes() -> None:
    stage = Endless()
    threads = ThreadPipeline([stage])
    future = threads.submit(slices(0), torch.zeros(1))
    assert stage.waiting.wait(timeout=30)
    assert not threads.close()  # says that a collective was left unfinished
    assert not any(thread.name.startswith("hpc ") for thread in threading.enumerate())
    with pytest.raises(CommunicationError, match="closed"):
        future.wait()


class FakeCuda:
    """Records what is issued to which stream: waits, events and stages."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.current = self.stream_named("compute")
        self.made = 0

    def stream_named(self, name: str) -> Any:
        def record_event() -> str:
            event = f"{name}#{sum(entry[:2] == ('record', name) for entry in self.log)}"
            self.log.append(("record", name, event))
            return event

        return SimpleNamespace(
            name=name,
            record_event=record_event,
            wait_event=lambda event: self.log.append(("wait", name, event)),
        )

    def Stream(self, device: torch.device) -> Any:  # noqa: N802
        self.made += 1
        return self.stream_named(f"stage{self.made - 1}")

    def current_stream(self, device: torch.device) -> Any:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        previous, self.current = self.current, stream
        yield
        self.current = previous


def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeCuda, list[str]]:
    """Puts the fake in place; the list gets the name of the stream on which each future is completed."""
    cuda = FakeCuda()
    completed_on: list[str] = []

    class FakeFuture(Future[torch.Tensor]):
        def __init__(self, devices: list[torch.device]) -> None:
            super().__init__()

        def set_result(self, result: torch.Tensor) -> None:
            completed_on.append(cuda.current.name)
            super().set_result(result)

    monkeypatch.setattr(pipeline.torch, "cuda", cuda)
    monkeypatch.setattr(pipeline, "Future", FakeFuture)
    return cuda, completed_on


def test_stream_pipeline_waits_for_the_computation_and_for_each_previous_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, completed_on = fake_cuda(monkeypatch)
    stages = [
        Local(lambda shards, index=index: cuda.log.append(("stage", cuda.current.name, index, int(shards[0]))))
        for index in range(3)
    ]
    streams = StreamPipeline(stages, torch.device("cpu"))
    tensor = torch.zeros(1)
    assert streams.submit(slices(0, 1), tensor).wait() is tensor

    log = cuda.log
    assert log[0] == ("record", "compute", "compute#0")
    for number in (0, 1):
        previous = "compute#0"
        for index in range(3):
            ran = log.index(("stage", f"stage{index}", index, number))
            assert ("wait", f"stage{index}", previous) in log[:ran]  # the stage's input is ready …
            recorded = next(entry for entry in log[ran:] if entry[:2] == ("record", f"stage{index}"))
            previous = recorded[2]  # … and what it leaves is announced after it
    assert completed_on == ["stage2"]  # so the future's event lies behind the last stage


class Handing:
    """A stage that uses all that the slice brings, and makes what the next stage finds."""

    ranks, depth = (0,), 1

    def __init__(self, cuda: FakeCuda, owners: dict[int, str], unsafe: list[str], is_first: bool) -> None:
        self.cuda, self.owners, self.unsafe, self.is_first = cuda, owners, unsafe, is_first
        self.kept: list[torch.Tensor] = []

    def start(self, item: Slice) -> None:
        if self.is_first:
            item.open()
            self._make(item.buffer)
        self._use(item)
        item.carried, item.lost = self._make(torch.ones(3)), self._make(torch.ones(2))
        item.scale = self._make(torch.ones(2))

    def finish(self, item: Slice) -> None:
        self._use(item)
        item.carried, item.poisoned = self._make(torch.zeros(3)), self._make(torch.tensor(False))

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kept.append(tensor)  # so that no two have the same identity
        self.owners[id(tensor)] = self.cuda.current.name
        return tensor

    def _use(self, item: Slice) -> None:
        stream = self.cuda.current.name
        for what in ("buffer", "carried", "scale", "lost", "poisoned"):
            tensor = getattr(item, what)
            is_foreign = tensor is not None and self.owners[id(tensor)] != stream
            if is_foreign and ("record_stream", id(tensor), stream) not in self.cuda.log:
                self.unsafe.append(f"{what} made on {self.owners[id(tensor)]} and used on {stream}")


def test_stream_pipeline_tells_the_allocator_who_uses_what_was_made_on_another_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, _ = fake_cuda(monkeypatch)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda tensor, stream: cuda.log.append(("record_stream", id(tensor), stream.name)),
        raising=False,
    )
    specs = [ParameterSpec("weight", 100, 10), ParameterSpec("bias", 10, 10)]
    layouts = codec_slices(specs, 1, 64, Grain(block=1), {"weight": 0, "bias": 0})
    bucket = torch.arange(110.0)
    unsafe: list[str] = []
    owners: dict[int, str] = {}
    streams = StreamPipeline([Handing(cuda, owners, unsafe, index == 0) for index in range(4)], torch.device("cpu"))
    items = [Slice(SlicePlan.make(layout, []), bucket, None) for layout in layouts]
    assert len(items) == 2
    assert streams.submit(items, bucket).wait() is bucket
    assert not unsafe
    recorded = [entry for entry in cuda.log if entry[0] == "record_stream"]
    assert len(recorded) == 2 * 3 * 5  # of each slice, in all stages but the first: those five tensors


def test_the_bucket_itself_is_left_to_its_owner() -> None:
    (layout,) = exact_slices(100, 2, 100)
    item = Slice(SlicePlan.make(layout, []), torch.zeros(100), None)
    assert item.temporaries == []
    item.open()
    assert item.temporaries == []
