import json
import logging
import os
import pickle
import re
import statistics
import time
import types
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler

from lightning_hpc.callbacks import StepTrace
from lightning_hpc.trace import Trace, read_trace, read_traces
from lightning_hpc.trace.records import PHASES
from tests.callbacks.models import Automatic, AutomaticIter, HookSleeper, Manual, ManualIter, Sleeper, make_loader

BATCHES = 7


def make_trainer(*callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{"accelerator": "cpu", "max_epochs": 1, **quiet, "callbacks": list(callbacks), **kwargs})


def trace_fit(dirpath: Path, model: pl.LightningModule, *callbacks: pl.Callback, **kwargs: Any) -> Trace:
    """Trains on seven batches an epoch and returns what was recorded."""
    trainer = make_trainer(StepTrace(dirpath, console=False), *callbacks, **kwargs)
    trainer.fit(model, make_loader(BATCHES))
    (trace,) = read_traces(dirpath)
    return trace


def assert_closed(trace: Trace) -> None:
    """The phases add up to the total, to the nanosecond."""
    for record in trace.steps:
        times = [round((record[f"{phase}_ms"] or 0) * 1e6) for phase in (*PHASES, "total")]
        assert sum(times[:-1]) == times[-1] > 0


def assert_nothing_counts_twice(trace: Trace) -> None:
    """Iterations and spans together are no longer than the time from the first to the last."""
    outer = [span for span in trace.spans if span["parent"] is None]
    recorded_ms = sum(record["total_ms"] for record in trace.steps) + sum(span["duration_ms"] for span in outer)
    last = trace.spans[-1]
    assert 0 < recorded_ms <= last["start_ms"] + last["duration_ms"] + 1e-3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("validation", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("loop", ["map", "stream", "dataloader_iter"])
@pytest.mark.parametrize("optimization", ["automatic", "manual"])
def test_phases_add_up_in_every_loop(
    tmp_path: Path, optimization: str, loop: str, accumulate: int, validation: bool, workers: int
) -> None:
    models = {"automatic": (Automatic, AutomaticIter), "manual": (Manual, ManualIter)}[optimization]
    model = models[loop == "dataloader_iter"](accumulate=accumulate)
    # Without a length, a module that accumulates by itself cannot know its last batch.
    ragged = optimization == "automatic" or loop != "stream"
    trainer = make_trainer(
        StepTrace(tmp_path, console=False),
        max_epochs=2,
        accumulate_grad_batches=accumulate if optimization == "automatic" else 1,
        # Validation in the middle of an epoch, where Lightning can count, and at its end.
        **({"val_check_interval": 4} if loop == "map" else {}),
    )
    validation_loader = make_loader(2, workers=workers) if validation else None
    trainer.fit(model, make_loader(BATCHES, workers=workers, stream=loop == "stream"), validation_loader)
    (trace,) = read_traces(tmp_path)

    assert_closed(trace)
    assert [(record["epoch"], record["batch"]) for record in trace.steps] == [
        (epoch, batch) for epoch in range(2) for batch in range(BATCHES)
    ]
    assert [record["optimizer_steps"] for record in trace.steps] == [
        int((batch + 1) % accumulate == 0 or (ragged and batch + 1 == BATCHES)) for batch in range(BATCHES)
    ] * 2
    assert trace.steps[-1]["step"] == trainer.global_step
    for record in trace.steps:
        assert all(record[f"{phase}_ms"] > 0 for phase in ("data_prep", "schedule", "forward", "backward"))
        assert (record["h2d_ms"] > 0) == (loop != "dataloader_iter")
        assert (record["optimizer_ms"] > 0) or record["optimizer_steps"] == 0
        assert record["comm_ms"] == record["comm_bytes"] == 0
        assert record["samples"] == 1
    assert statistics.median(abs(record["unattributed_ms"]) / record["total_ms"] for record in trace.steps) <= 0.005
    spans = [span["name"] for span in trace.spans]
    validations = ["validation"] if validation else []
    epoch = ["loader_start", *validations]
    assert spans == ["startup", *epoch, "between_epochs", *epoch, "shutdown"]
    assert_nothing_counts_twice(trace)


def largest_phase(trace: Trace) -> str:
    # In the median: the first optimizer step of a process imports what it needs.
    return max(PHASES, key=lambda phase: statistics.median(record[f"{phase}_ms"] for record in trace.steps))


PLANTED = {
    "data_prep": "data_prep",
    "before_transfer": "h2d",
    "transfer": "h2d",
    "callback": "schedule",
    "before_backward_callback": "schedule",
    "after_backward_hook": "schedule",
    "forward": "forward",
    "backward": "backward",
    "clipping": "optimizer",
    "optimizer": "optimizer",
}


@pytest.mark.parametrize("callback_first", [True, False])
@pytest.mark.parametrize("optimization", [Automatic, Manual])
@pytest.mark.parametrize("place", PLANTED)
def test_a_planted_sleep_lands_in_its_phase(
    tmp_path: Path, place: str, optimization: type[Automatic], callback_first: bool
) -> None:
    if place == "clipping" and optimization is Manual:
        pytest.skip("manual optimization has no clipping hook")
    sleeper = Sleeper(place, 0.03)
    callbacks = [StepTrace(tmp_path, console=False), HookSleeper(sleeper)]
    trainer = make_trainer(*(reversed(callbacks) if callback_first else callbacks))
    trainer.fit(optimization(sleeper), make_loader(3, plant=sleeper))
    (trace,) = read_traces(tmp_path)
    assert_closed(trace)
    assert all(record[f"{PLANTED[place]}_ms"] >= 30 for record in trace.steps)
    assert largest_phase(trace) == PLANTED[place]


def test_a_fetch_within_the_training_step_is_data_prep(tmp_path: Path) -> None:
    sleeper = Sleeper("data_prep", 0.03)
    trainer = make_trainer(StepTrace(tmp_path, console=False))
    trainer.fit(AutomaticIter(), make_loader(3, plant=sleeper))
    (trace,) = read_traces(tmp_path)
    assert all(record["data_prep_ms"] >= 30 for record in trace.steps)
    assert largest_phase(trace) == "data_prep"


def test_validation_is_a_span_and_no_part_of_a_step(tmp_path: Path) -> None:
    trainer = make_trainer(StepTrace(tmp_path, console=False), val_check_interval=2, num_sanity_val_steps=1)
    trainer.fit(Automatic(Sleeper("validation", 0.2)), make_loader(4), make_loader(2))
    (trace,) = read_traces(tmp_path)
    validations = [span for span in trace.spans if span["name"] == "validation"]
    assert len(validations) == 2
    assert all(span["duration_ms"] >= 400 and span["epoch"] == 0 for span in validations)
    assert_nothing_counts_twice(trace)
    assert trace.spans[0]["name"] == "startup"
    assert trace.spans[0]["duration_ms"] >= 200


def test_header(tmp_path: Path) -> None:
    header = trace_fit(tmp_path, Automatic()).header
    assert (header["rank"], header["world_size"], header["attempt"], header["pid"]) == (0, 1, 0, os.getpid())
    assert header["clock"] == "host"
    assert header["device_type"] == "cpu"
    assert abs(header["started_at"] - time.time()) < 60
    assert set(header["versions"]) == {"python", "torch", "lightning", "lightning_hpc"}


def test_default_directory(tmp_path: Path) -> None:
    make_trainer(StepTrace(), default_root_dir=tmp_path, fast_dev_run=True).fit(Automatic(), make_loader(1))
    assert (tmp_path / "step_trace" / "attempt_000" / "rank_00000.jsonl").is_file()
    logger = pl.loggers.CSVLogger(tmp_path / "logs")
    make_trainer(StepTrace(), default_root_dir=tmp_path, logger=logger, max_steps=1).fit(Automatic(), make_loader(1))
    assert (Path(logger.log_dir) / "step_trace" / "attempt_000" / "rank_00000.jsonl").is_file()


def test_a_resumed_run_makes_the_next_attempt_and_leaves_the_first(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", save_last=True)
    trace_fit(traces, Automatic(), checkpoint, enable_checkpointing=True)
    first = traces / "attempt_000" / "rank_00000.jsonl"
    before = first.read_bytes()
    trainer = make_trainer(StepTrace(traces, console=False), max_epochs=2)
    trainer.fit(Automatic(), make_loader(BATCHES), ckpt_path=checkpoint.last_model_path)
    assert first.read_bytes() == before
    assert sorted(path.name for path in traces.iterdir()) == ["attempt_000", "attempt_001"]
    resumed = read_trace(traces / "attempt_001" / "rank_00000.jsonl")
    assert resumed.header["attempt"] == 1
    assert [(record["epoch"], record["step"]) for record in resumed.steps] == [
        (1, 8 + batch) for batch in range(BATCHES)
    ]
    assert [record["optimizer_steps"] for record in resumed.steps] == [1] * BATCHES


class Failing(Automatic):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise RuntimeError("planted")
        return super().training_step(batch, batch_idx)


def open_files(directory: Path) -> list[str]:
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return [link for link in links if link.startswith(str(directory))]


def test_an_exception_restores_the_profiler_and_closes_the_file(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    trainer = make_trainer(StepTrace(tmp_path, console=False), profiler=profiler)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(Failing(), make_loader(BATCHES))
    assert trainer.profiler is profiler
    assert open_files(tmp_path) == []
    (trace,) = read_traces(tmp_path)
    assert [record["batch"] for record in trace.steps] == [0, 1, 2]
    assert [span["name"] for span in trace.spans][2:] == ["unfinished_iteration", "shutdown"]
    assert_closed(trace)


def test_stopping_in_the_middle_writes_all_finished_iterations(tmp_path: Path) -> None:
    trace = trace_fit(tmp_path, Automatic(), max_steps=4, max_epochs=-1)
    assert [record["batch"] for record in trace.steps] == [0, 1, 2, 3]
    assert_closed(trace)


def test_user_profiler_sees_the_same_actions(tmp_path: Path) -> None:
    def count(*callbacks: pl.Callback) -> dict[str, int]:
        profiler = SimpleProfiler()
        trainer = make_trainer(*callbacks, profiler=profiler, max_epochs=2, accumulate_grad_batches=3)
        trainer.fit(Automatic(), make_loader(BATCHES), make_loader(2))
        assert profiler.current_actions == {}
        return {name: len(times) for name, times in profiler.recorded_durations.items() if "StepTrace" not in name}

    assert count(StepTrace(tmp_path, console=False)) == count()


def test_the_profiler_is_replaced_during_the_fit_only(tmp_path: Path) -> None:
    seen = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.append(trainer.profiler)

    trainer = make_trainer(StepTrace(tmp_path, console=False), Look())
    before = trainer.profiler
    trainer.fit(Automatic(), make_loader(2))
    assert seen[0] is not before
    assert isinstance(seen[0], PassThroughProfiler)
    assert trainer.profiler is before


def test_a_directory_that_only_looks_like_an_attempt_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f"attempt_{'9' * 30}").mkdir()
    (tmp_path / "attempt_x").mkdir()
    trace = StepTrace(tmp_path, console=False)
    make_trainer(trace).fit(Automatic(), make_loader(2))
    assert trace.path == tmp_path / "attempt_000" / "rank_00000.jsonl"


def test_a_second_fit_of_the_same_trainer_is_a_second_attempt(tmp_path: Path) -> None:
    trainer = make_trainer(StepTrace(tmp_path, console=False), max_epochs=1)
    trainer.fit(Automatic(), make_loader(2))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Automatic(), make_loader(2))
    assert [len(trace.steps) for trace in read_traces(tmp_path)] == [2, 2]


def test_other_stages_write_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(StepTrace(tmp_path, console=False))
    trainer.validate(Automatic(), make_loader(2))
    assert list(tmp_path.iterdir()) == []


LINE = r"data_prep=\d+\.\dms schedule=\d+\.\dms compute=\d+\.\dms comm=0\.0ms"


def test_console_lines_without_a_progress_bar(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_trainer(StepTrace(tmp_path), log_every_n_steps=3).fit(Automatic(), make_loader(BATCHES))
    assert len([message for message in caplog.messages if re.fullmatch(LINE, message)]) == 2


def test_console_lines_go_through_the_progress_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(StepTrace(tmp_path), log_every_n_steps=3, enable_progress_bar=True)
    trainer.fit(Automatic(), make_loader(BATCHES))
    assert len(re.findall(LINE, "".join(capsys.readouterr()))) == 2


def test_console_can_be_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        trace_fit(tmp_path, Automatic(), log_every_n_steps=1)
    assert not [message for message in caplog.messages if "data_prep=" in message]


def test_a_full_disk_ends_the_trace_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def fail_after_five(writer: object, lines: bytes) -> None:
        written.append(lines)
        if len(written) > 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_hpc.trace.writer.TraceWriter.write", fail_after_five)
    # Each interval of the console is written for itself.
    trainer = make_trainer(StepTrace(tmp_path, console=False), log_every_n_steps=1)
    with pytest.warns(RuntimeWarning, match="StepTrace of rank 0 stops: .*No space left"):
        trainer.fit(Automatic(), make_loader(BATCHES))
    assert trainer.global_step == BATCHES
    assert len(written) == 6


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than one StepTrace"):
        make_trainer(StepTrace(tmp_path), StepTrace(tmp_path)).fit(Automatic(), make_loader(1))
    with pytest.raises(ValueError, match="'s3://bucket/x' is not a local directory"):
        make_trainer(StepTrace("s3://bucket/x")).fit(Automatic(), make_loader(1))
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_of_the_other_package_is_named() -> None:
    trainer = types.new_class(
        "Trainer", exec_body=lambda body: body.update(__module__="pytorch_lightning.trainer.trainer")
    )
    derived = type("MyTrainer", (trainer,), {})
    with pytest.raises(
        TypeError, match=r"pytorch_lightning and lightning\.pytorch .*import Trainer from lightning\.pytor"
    ):
        StepTrace().setup(derived(), Automatic(), "fit")


def test_pickles_before_setup(tmp_path: Path) -> None:
    callback = pickle.loads(pickle.dumps(StepTrace(tmp_path)))
    make_trainer(callback).fit(Automatic(), make_loader(1))
    assert len(read_traces(tmp_path)) == 1


def spans_named(trace: Trace, *names: str) -> list[tuple[str, str | None, int | None]]:
    return [(span["name"], span["parent"], span["epoch"]) for span in trace.spans if span["name"] in names]


def test_checkpoints_are_spans_and_no_part_of_a_step(tmp_path: Path) -> None:
    class SlowIO(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.3)
            super().save_checkpoint(*args, **kwargs)

    every_three = ModelCheckpoint(tmp_path / "a", every_n_train_steps=3, save_top_k=-1)
    after_validation = ModelCheckpoint(tmp_path / "b", filename="last", save_on_train_epoch_end=False)
    trainer = make_trainer(
        StepTrace(tmp_path, console=False),
        every_three,
        after_validation,
        enable_checkpointing=True,
        plugins=[SlowIO()],
    )
    trainer.fit(Automatic(), make_loader(BATCHES), make_loader(2))
    (trace,) = read_traces(tmp_path)
    checkpoints = [("checkpoint", None, 0)] * 2 + [("checkpoint", "validation", 0)]
    assert spans_named(trace, "checkpoint") == checkpoints
    assert all(span["duration_ms"] >= 300 for span in trace.spans if span["name"] in ("checkpoint", "validation"))
    # Of these, one at most may be disturbed by other work on the machine.
    assert sum(record["total_ms"] >= 300 for record in trace.steps) <= 1
    assert_closed(trace)
    assert_nothing_counts_twice(trace)


class SlowLogger(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        time.sleep(0.05)
        self.logged.append((step, dict(metrics)))


def test_logging_is_a_span_and_loggers_get_the_means(tmp_path: Path) -> None:
    class Logging(Automatic):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("seen", 1.0)
            return super().training_step(batch, batch_idx)

    logger = SlowLogger()
    trainer = make_trainer(StepTrace(tmp_path, console=False), logger=logger, log_every_n_steps=2)
    trainer.fit(Logging(), make_loader(BATCHES))
    (trace,) = read_traces(tmp_path)
    logged = [metrics for _, metrics in logger.logged if "seen" in metrics]
    assert len(logged) == 3
    means = [(step, metrics) for step, metrics in logger.logged if "step_trace/total_ms" in metrics]
    assert [step for step, _ in means] == [2, 4, 6]
    steps = trace.steps[2:4]
    assert means[1][1]["step_trace/forward_ms"] == pytest.approx(sum(step["forward_ms"] for step in steps) / 2)
    rate = sum(step["samples"] for step in steps) / sum(step["total_ms"] for step in steps) * 1e3
    assert means[1][1]["step_trace/samples_per_second"] == pytest.approx(rate)
    written = [span for span in trace.spans if span["name"] == "logging" and span["duration_ms"] >= 50]
    assert len(written) == len(logger.logged)
    assert "log_metrics" not in vars(logger)
    assert_closed(trace)
    assert_nothing_counts_twice(trace)


def test_other_callbacks_add_events_memory_and_listeners(tmp_path: Path) -> None:
    class Other(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trace = StepTrace.find(trainer)
            assert trace is not None
            trace.listen(heard.append)
            trace.write_event("precision", {"level": 1})

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            StepTrace.find(trainer).write_memory({"memory_used_bytes": 5})  # type: ignore[union-attr]

    heard: list[tuple[float | None, ...]] = []
    trace = trace_fit(tmp_path, Automatic(), Other())
    assert [(event["name"], event["details"], event["step"]) for event in trace.events] == [
        ("precision", {"level": 1}, 0)
    ]
    assert [(reading["batch"], reading["memory_used_bytes"]) for reading in trace.memory] == [
        (batch, 5) for batch in range(BATCHES)
    ]
    keys = (*(f"{phase}_ms" for phase in PHASES), "total_ms", "epoch", "batch")
    assert heard == [pytest.approx([step[key] for key in keys]) for step in trace.steps]
    lines = [json.loads(line) for line in trace.path.read_text().splitlines()]
    assert [line["batch"] for line in lines if line["type"] == "step"] == list(range(BATCHES))


def test_a_listener_outside_a_fit_and_records_outside_a_fit(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path)
    trace.write_event("precision", {})
    trace.write_memory({})
    with pytest.raises(RuntimeError, match="records nothing now; call listen from on_fit_start"):
        trace.listen(print)
    assert StepTrace.find(make_trainer()) is None


def test_hooks_without_use_are_not_called_during_the_fit_only(tmp_path: Path) -> None:
    class Subclass(StepTrace):
        def on_before_zero_grad(self, *args: Any) -> None:
            super().on_before_zero_grad(*args)
            calls.append(self.on_train_batch_start)

    calls: list[Any] = []
    trace = Subclass(tmp_path, console=False)
    make_trainer(trace).fit(Automatic(), make_loader(2))
    assert calls == [None, None]
    assert callable(trace.on_train_batch_start)
