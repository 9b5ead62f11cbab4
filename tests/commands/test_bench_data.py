"""`lightning-hpc bench data` as a user calls it; the samples are tiny, so that nothing depends on the machine."""

import json
import multiprocessing
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from lightning_hpc.commands.bench import main
from lightning_hpc.commands.bench_data import default_workers, make_parser

QUICK = ["--workers", "0", "1", "--batches", "4", "--rounds", "2", "--seconds", "30"]

MODULES = """
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

class Samples(Dataset):
    def __init__(self, length, where="nowhere"):
        self.length, self.where = length, where

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.where == "everywhere" or (self.where == "workers" and get_worker_info() is not None):
            raise OSError(f"no sample in {self.where}")
        return torch.full((8,), float(index)), index

class Tiny(LightningDataModule):
    torn_down = []

    def __init__(self, batch_size: int = 2, length: int = 200, where: str = "nowhere"):
        super().__init__()
        if batch_size < 1:
            raise ValueError("no batch without samples")
        self.batch_size, self.data = batch_size, Samples(length, where)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=True)

    def teardown(self, stage):
        self.torn_down.append(stage)

class Nothing(LightningDataModule):
    pass

class Several(Tiny):
    def train_dataloader(self):
        return {"first": super().train_dataloader(), "second": None}

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(400.0))

def stream(batch_size: int = 2) -> DataLoader:
    return DataLoader(Stream(), batch_size=batch_size)

class OwnLoader(DataLoader):
    pass

def own_loader() -> DataLoader:
    return OwnLoader(Samples(200))
"""


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench_datasets.py").write_text(MODULES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "bench_datasets", raising=False)


def bench(name: str, *arguments: str) -> None:
    main(["data", "--data", f"bench_datasets.{name}", *arguments])


def test_it_measures_both_loaders_in_turns_and_writes_all_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("d.json", "d.svg", "d.html")]
    bench("Tiny", "--data.batch_size", "5", *QUICK, "--output", *map(str, files))
    printed, said = capsys.readouterr()
    headline = "bench_datasets.Tiny: Samples, 5 samples and 200 bytes in a batch; "
    for text in (headline, "SharedMemoryLoader", "At their best: ", *(f"wrote {file}" for file in files)):
        assert text in printed
    turns = [line.split(":")[0].split(" ", 2)[2] for line in said.splitlines() if line.startswith("round ")]
    there = [f"{name} num_workers={count}" for count in (0, 1) for name in ("DataLoader", "SharedMemoryLoader")]
    assert turns == [*there, *reversed(there)]
    content = json.loads(files[0].read_text())
    assert content["format"] == "lightning_hpc.bench_data/1"
    assert content["complete"] is True
    assert content["errors"] == content["remarks"] == []
    facts = content["environment"]
    assert (facts["workers"], facts["rounds"], facts["batches"], facts["step_ms"]) == ([0, 1], 2, 4, None)
    assert (facts["batch_samples"], facts["batch_bytes"], facts["loader"]) == (5, 200, "DataLoader")
    assert {"torch", "lightning", "lightning_hpc", "platform", "processors"} <= facts.keys()
    assert [(result["loader"], result["workers"]) for result in content["results"]] == [
        ("DataLoader", 0),
        ("SharedMemoryLoader", 0),
        ("DataLoader", 1),
        ("SharedMemoryLoader", 1),
    ]
    for each in content["trials"]:
        assert [(trial["samples"], trial["bytes"]) for trial in each["rounds"]] == [(20, 800), (20, 800)]
    assert [result["ratio_range"] is None for result in content["results"]] == [True, False, True, False]
    assert len(content["verdicts"]) == 4
    ET.fromstring(files[1].read_text())
    assert files[1].read_text() in files[2].read_text()
    assert content["verdicts"][-1] in files[2].read_text()


def test_nothing_is_left_behind() -> None:
    bench("Tiny", *QUICK)  # what is opened once and for all
    before = len(list(Path("/proc/self/fd").iterdir()))
    bench("Tiny", *QUICK)
    assert multiprocessing.active_children() == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert sys.modules["bench_datasets"].Tiny.torn_down == ["fit", "fit"]


def test_with_a_step_it_says_how_long_the_step_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench("Tiny", *QUICK, "--step-ms", "5", "--output", "d.json")
    assert "; each step takes 5 ms" in capsys.readouterr().out
    content = json.loads((tmp_path / "d.json").read_text())
    assert "the step waits" in content["verdicts"][0]
    assert all(
        trial["seconds"] - trial["wait_seconds"] >= 4 * 0.005 for each in content["trials"] for trial in each["rounds"]
    )


def test_a_function_that_returns_a_loader_will_do(capsys: pytest.CaptureFixture[str]) -> None:
    bench("stream", "--data.batch_size", "8", *QUICK)
    printed = capsys.readouterr().out
    assert "bench_datasets.stream: Stream, 8 samples and 32 bytes in a batch" in printed
    assert "The dataset is iterable: unless it looks at get_worker_info()" in printed


def test_a_loader_of_another_class_is_measured_alone(capsys: pytest.CaptureFixture[str]) -> None:
    bench("own_loader", *QUICK)
    printed = capsys.readouterr().out
    assert "The loader is a OwnLoader" in printed
    assert "At their best" not in printed
    assert "DataLoader: " in printed


def test_what_fails_costs_only_its_own_results_and_is_not_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench("Tiny", "--data.where", "workers", *QUICK, "--output", "d.json")
    printed, said = capsys.readouterr()
    assert "DataLoader with num_workers=1 failed: OSError: no sample in workers" in printed
    assert said.count("DataLoader num_workers=1: failed") == 1
    assert said.count("SharedMemoryLoader num_workers=0: ") == 2
    content = json.loads((tmp_path / "d.json").read_text())
    assert [result["workers"] for result in content["results"]] == [0, 0]
    assert [(error["loader"], error["workers"]) for error in content["errors"]] == [
        ("DataLoader", 1),
        ("SharedMemoryLoader", 1),
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("Tiny", ["--data.where", "everywhere"], r"first batches cannot be read: OSError: no sample in everywhere \(b"),
        ("Tiny", ["--data.where", "workers", "--workers", "1"], "cannot be read: OSError: no sample in workers"),
        ("Tiny", ["--data.batch_size", "0"], r"(?s)bench_datasets.Tiny cannot be made: .*no batch without samples"),
        ("Tiny", ["--data.length", "2"], r"bench_datasets.Tiny: an epoch has 1 batches, and the first 2 are not timed"),
        ("Tiny", ["--data.length", "4"], r"(?s)no loader could be measured:\n  DataLoader, 0 workers: TooFewBatches"),
        ("Nothing", [], "Nothing.train_dataloader.. failed: MisconfigurationException: `train_dataloader` must be"),
        ("Tiny", ["--output", "c.txt"], r"c\.txt: its name must end with one of"),
    ],
)
def test_faults_are_named_with_the_way_out(name: str, arguments: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        bench(name, "--workers", "0", "--seconds", "30", *arguments)


def test_without_data_it_says_what_to_give() -> None:
    with pytest.raises(SystemExit, match=r"what is to be read.*--data my_package\.MyDataModule"):
        main(["data"])


@pytest.mark.parametrize(
    "arguments", [["--data", "bench_datasets.Samples"], ["--step-ms", "0"], ["--workers", "-1"], ["--rounds", "0"]]
)
def test_arguments_are_checked(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["data", *arguments])
    assert raised.value.code == 2
    assert arguments[0].lstrip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")


@pytest.mark.parametrize(("processors", "counts"), [(1, [0, 1]), (2, [0, 1, 2]), (12, [0, 1, 2, 4, 8])])
def test_as_many_workers_as_processors_are_tried(processors: int, counts: list[int]) -> None:
    assert default_workers(processors) == counts


def test_every_argument_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(action.help for action in make_parser()._actions)
    with pytest.raises(SystemExit):
        main(["data", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: lightning-hpc bench data ")
    for argument in ("--data.help", "--workers", "--seconds", "--batches", "--rounds", "--step-ms", "--output"):
        assert argument in text
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["options:"]
