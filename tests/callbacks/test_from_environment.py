import sys
import types
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_hpc.callbacks import StepTrace
from lightning_hpc.callbacks.from_environment import callbacks_from_environment
from lightning_hpc.trace import read_traces
from tests.callbacks.models import Automatic, make_loader
from tests.callbacks.test_step_trace import make_trainer


class FakeReport(Callback):
    """Takes the place of the report, which needs the trace when it is set up."""

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert StepTrace.find(trainer) is not None


@pytest.fixture(autouse=True)
def fake_report(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("performance_report")
    module.PerformanceReport = FakeReport
    monkeypatch.setitem(sys.modules, "lightning_hpc.callbacks.performance_report", module)


class Witness(Callback):
    """Counts its set-ups."""

    set_up = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.set_up += 1


def fit(trainer: pl.Trainer, model: pl.LightningModule | None = None) -> list[Callback]:
    """The Trainer's callbacks during the fit."""
    trainer.fit(model or Automatic(), make_loader(2))
    return list(trainer.callbacks)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "environment", [{}, {"LIGHTNING_HPC_TRACE": ""}, {"LIGHTNING_HPC_TRACE": "0"}, {"LIGHTNING_HPC_TRACE": "off"}]
)
def test_nothing_is_added_unless_a_variable_is_set(environment: dict[str, str]) -> None:
    assert callbacks_from_environment(environment) == []


@pytest.mark.parametrize("value", ["1", "True"])
def test_a_trace_in_the_default_directory_or_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("LIGHTNING_HPC_TRACE", value)
    fit(make_trainer(default_root_dir=tmp_path))
    assert len(read_traces(tmp_path / "step_trace")) == 1
    monkeypatch.setenv("LIGHTNING_HPC_TRACE", str(tmp_path / "there"))
    fit(make_trainer())
    assert len(read_traces(tmp_path / "there")) == 1


def test_the_callbacks_around_it_are_set_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HPC_TRACE", str(tmp_path / "trace"))

    class LastWitness(ModelCheckpoint):
        set_up = 0

        def setup(self, *args: Any, **kwargs: Any) -> None:
            self.set_up += 1

    first, last = Witness(), LastWitness(tmp_path, save_top_k=0)
    callbacks = fit(make_trainer(first, last, enable_checkpointing=True))
    assert [type(callback) for callback in callbacks] == [Witness, StepTrace, LastWitness]
    assert (first.set_up, last.set_up) == (1, 1)


def test_the_users_own_trace_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HPC_TRACE", str(tmp_path / "from_environment"))
    mine, witness = StepTrace(tmp_path / "mine", console=False), Witness()
    assert fit(make_trainer(mine, witness)) == [mine, witness]
    assert len(read_traces(tmp_path / "mine")) == 1
    assert not (tmp_path / "from_environment").exists()


def test_the_models_own_trace_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HPC_TRACE", str(tmp_path / "from_environment"))
    mine = StepTrace(tmp_path / "mine", console=False)

    class Model(Automatic):
        def configure_callbacks(self) -> Callback:
            return mine

    assert fit(make_trainer(), Model()) == [mine]
    assert not (tmp_path / "from_environment").exists()


def test_a_list_of_callbacks_may_be_given_to_two_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HPC_TRACE", str(tmp_path))
    witness = Witness()
    # Lightning adds what the environment asks for to this list, each time.
    callbacks: list[Callback] = [witness]
    for number in (1, 2):
        found = fit(make_trainer(callbacks=callbacks))
        assert [type(callback) for callback in found] == [Witness, StepTrace]
        assert witness.set_up == number
    assert [trace.header["attempt"] for trace in read_traces(tmp_path)] == [0, 1]


def test_several_fits_and_a_validation_of_one_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HPC_TRACE", str(tmp_path))
    trainer = make_trainer()
    trainer.validate(Automatic(), make_loader(1), verbose=False)
    assert not list(tmp_path.iterdir())
    fit(trainer)
    fit(trainer)
    assert len(read_traces(tmp_path)) == 2


def test_a_report_brings_the_trace_that_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HPC_REPORT", "report")
    trace, report = fit(make_trainer(default_root_dir=tmp_path))
    assert isinstance(trace, StepTrace)
    assert isinstance(report, FakeReport)
    assert report.dirpath == "report"
    assert len(read_traces(tmp_path / "step_trace")) == 1


def test_the_users_own_report_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HPC_REPORT", "1")
    mine = [StepTrace(tmp_path, console=False), FakeReport()]
    assert fit(make_trainer(*mine)) == mine
