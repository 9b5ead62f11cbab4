"""`CudaMarks` with recording fakes of the device, which comes to its events late; and, where there is one, on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hpc.callbacks import StepTrace, step_recorder
from lightning_hpc.callbacks.cuda_marks import CudaMarks
from lightning_hpc.trace import read_traces
from lightning_hpc.trace.marked_timeline import OUTSIDE
from lightning_hpc.trace.timeline import Phase
from tests.callbacks.models import Automatic, make_loader
from tests.callbacks.test_step_trace import make_trainer


class FakeDevice:
    """Does its work in order, each event at a time that a test sets, and has come so far as a test says."""

    def __init__(self) -> None:
        self.recorded: list[FakeEvent] = []
        self.events_made = 0
        self.passed = 0
        self.is_capturing = False
        self.has_failed = False
        self.waited = 0


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        device.events_made += 1

    def record(self, stream: Any) -> None:
        if self.device.has_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.place = len(self.device.recorded)
        self.device.recorded.append(self)

    def query(self) -> bool:
        if self.device.has_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.place < self.device.passed

    def synchronize(self) -> None:
        if self.device.has_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.device.waited += 1
        self.device.passed = max(self.device.passed, self.place + 1)

    def elapsed_time(self, other: "FakeEvent") -> float:
        assert other.query(), "read before the device has come to it"
        return float(other.place**2 - self.place**2)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(fake))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.is_capturing)
    return fake


def note(marks: CudaMarks, *phases: int) -> Any:
    for phase in (*phases, OUTSIDE):
        marks.mark(phase)
    return marks.cut()


def test_times_are_the_devices_and_read_when_it_has_passed(device: FakeDevice) -> None:
    marks = CudaMarks(torch.device("cuda"))
    iteration = note(marks, Phase.DATA_PREP, Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD)
    assert not iteration.has_passed()
    device.passed = 5
    assert iteration.has_passed()
    charged, total = iteration.read()
    assert [charged[phase] for phase in (Phase.DATA_PREP, Phase.FORWARD, Phase.BACKWARD)] == [
        10**6,
        10 * 10**6,
        5 * 10**6,
    ]
    assert total == sum(charged) == 16 * 10**6
    assert device.waited == 0


def test_events_are_used_again(device: FakeDevice) -> None:
    marks = CudaMarks(torch.device("cuda"))
    for _ in range(10):
        iteration = note(marks, Phase.FORWARD, Phase.BACKWARD)
        device.passed = len(device.recorded)
        iteration.read()
    assert device.events_made == 3


def test_spans_are_left_out(device: FakeDevice) -> None:
    iteration = note(CudaMarks(torch.device("cuda")), Phase.FORWARD, OUTSIDE, Phase.FORWARD)
    device.passed = 4
    charged, total = iteration.read()
    assert charged[Phase.FORWARD] == total == (1 + 5) * 10**6


def test_a_capture_is_left_alone(device: FakeDevice) -> None:
    marks = CudaMarks(torch.device("cuda"))
    marks.mark(Phase.FORWARD)
    device.is_capturing = True
    marks.mark(Phase.BACKWARD)
    device.is_capturing = False
    marks.mark(OUTSIDE)
    assert len(device.recorded) == 2


@pytest.fixture
def marks_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks as on CUDA, where everything else of a fit runs on the CPU."""
    monkeypatch.setattr(step_recorder, "is_timed_by_marks", lambda device: True)


@pytest.mark.parametrize("lag", [0, 7, 10**6])
def test_a_fit_has_all_its_iterations_however_late_the_device_is(
    tmp_path: Path, device: FakeDevice, marks_on_cpu: None, lag: int
) -> None:
    class Device(torch.utils.data.Sampler[int]):
        """The device goes on whenever a batch is fetched."""

        def __len__(self) -> int:
            return 9

        def __iter__(self) -> Any:
            for index in range(9):
                device.passed = max(device.passed, len(device.recorded) - lag)
                yield index

    loader = torch.utils.data.DataLoader(make_loader(9).dataset, sampler=Device())
    make_trainer(StepTrace(tmp_path, console=False), log_every_n_steps=2).fit(Automatic(), loader)
    (trace,) = read_traces(tmp_path)
    assert [step["batch"] for step in trace.steps] == list(range(9))
    for step in trace.steps:
        assert step["total_ms"] >= 1
        assert step["total_ms"] == round(step["total_ms"])  # the fake's milliseconds are whole
        assert step["unattributed_ms"] == 0
    assert device.events_made <= len(device.recorded)
    assert device.waited <= 1 or lag > 0


def test_a_device_that_failed_costs_the_iterations_it_had_not_passed(
    tmp_path: Path, device: FakeDevice, marks_on_cpu: None
) -> None:
    class Failing(Automatic):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                device.has_failed = True
                raise ValueError("the user's")
            return super().training_step(batch, batch_idx)

    with (
        pytest.warns(
            RuntimeWarning, match="the last 3 iterations of rank 0 are not in the trace.*illegal memory access"
        ),
        pytest.raises(ValueError, match="the user's"),
    ):
        make_trainer(StepTrace(tmp_path, console=False)).fit(Failing(), make_loader(9))
    (trace,) = read_traces(tmp_path)
    assert trace.steps == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_times_on_a_gpu(tmp_path: Path) -> None:
    class Heavy(Automatic):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.cuda._sleep(20_000_000)  # the device's clock cycles, ten milliseconds or more
            return super().training_step(batch, batch_idx)

    make_trainer(StepTrace(tmp_path, console=False), accelerator="gpu", devices=1).fit(Heavy(), make_loader(20))
    (trace,) = read_traces(tmp_path)
    assert trace.header["clock"] == "cuda"
    assert len(trace.steps) == 20
    for step in trace.steps[2:]:
        assert step["forward_ms"] > 0.8 * step["total_ms"] > 5
        assert step["data_prep_ms"] < 0.1 * step["total_ms"]
