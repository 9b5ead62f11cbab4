import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from lightning_hpc.callbacks import MemoryMonitor, PerformanceReport, StepTrace, performance_report
from lightning_hpc.trace import read_traces
from tests.callbacks.models import Automatic, make_loader
from tests.callbacks.test_step_trace import make_trainer
from tests.helpers import run_ranks


class Logging(Automatic):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("first", [True, False])
def test_a_fit_leaves_a_report_of_all_its_iterations(tmp_path: Path, first: bool) -> None:
    report = PerformanceReport()
    callbacks = [report, StepTrace(tmp_path, console=False), MemoryMonitor()]
    make_trainer(*(callbacks if first else callbacks[::-1])).fit(Logging(), make_loader(7))
    assert report.path == tmp_path / "attempt_000" / "report.html"
    content = json.loads(report.path.with_suffix(".json").read_text())
    assert content["headline"]["steps"] == 7
    assert "loss" in content["metrics"]
    assert content["headline"]["peak_memory_bytes"] > 2**20
    assert "shutdown" in content["time_s"]
    (trace,) = read_traces(tmp_path)  # the report's files are no traces
    assert trace.spans[-1]["name"] == "shutdown"


def test_an_exception_leaves_a_report_too(tmp_path: Path) -> None:
    class Failing(Automatic):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise ValueError("planted")
            return super().training_step(batch, batch_idx)

    report = PerformanceReport(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="planted"):
        make_trainer(StepTrace(tmp_path, console=False), report).fit(Failing(), make_loader(7))
    assert report.path == tmp_path / "elsewhere" / "report.html"
    assert json.loads(report.path.with_suffix(".json").read_text())["headline"]["steps"] == 3


def test_a_report_that_fails_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = make_trainer(StepTrace(tmp_path, console=False), PerformanceReport(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="PerformanceReport could not be made: .*file"):
        trainer.fit(Automatic(), make_loader(3))
    assert trainer.global_step == 3


def test_without_a_trace_it_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Trainer\(callbacks=\[StepTrace\(\), PerformanceReport\(\)\]\)"):
        make_trainer(PerformanceReport()).fit(Automatic(), make_loader(3))


def test_a_fit_without_an_iteration_and_other_stages_leave_none(tmp_path: Path) -> None:
    report = PerformanceReport()
    make_trainer(StepTrace(tmp_path, console=False), report, max_epochs=0).fit(Automatic(), make_loader(3))
    make_trainer(report).validate(Automatic(), make_loader(3), verbose=False)
    assert report.path is None


def fit_on_ranks(rank: int, world_size: int, dirpath: Path) -> str | None:
    warnings.simplefilter("ignore")
    report = PerformanceReport()
    trainer = make_trainer(StepTrace(dirpath, console=False), report, devices=world_size, strategy="ddp")
    trainer.fit(Automatic(), make_loader(8))
    return None if report.path is None else report.path.name


def test_rank_0_reports_on_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(fit_on_ranks, 2, tmp_path, init_gloo=False) == ["report.html", None]
    content = json.loads((tmp_path / "attempt_000" / "report.json").read_text())
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1]


def test_files_that_are_gone_or_too_large_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Deleting(Automatic):
        def on_train_end(self) -> None:
            shutil.rmtree(tmp_path / "gone")

    with pytest.warns(RuntimeWarning, match=r"could not be made: .*attempt_000 has no trace any more"):
        make_trainer(StepTrace(tmp_path / "gone", console=False), PerformanceReport()).fit(Deleting(), make_loader(3))
    monkeypatch.setattr(performance_report, "_MOST_BYTES", 100)
    trainer = make_trainer(StepTrace(tmp_path / "large", console=False), PerformanceReport())
    with pytest.warns(RuntimeWarning, match="too many to read .*; run lightning-hpc report .*attempt_000"):
        trainer.fit(Automatic(), make_loader(3))
