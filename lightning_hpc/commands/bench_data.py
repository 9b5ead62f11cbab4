"""``lightning-hpc bench data``: how many workers does a DataModule need, and with which loader?"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_hpc.commands.argument_types import Positive
from lightning_hpc.commands.bench_options import add_class, add_output, instantiate, usable_processors, versions
from lightning_hpc.commands.data_result import PEER
from lightning_hpc.commands.data_view import DataView, format_rate
from lightning_hpc.commands.output_files import check_outputs, refuse, write_outputs
from lightning_hpc.commands.timed_read import ReadLimits, TimedRead, TooFewBatchesError, timed_read
from lightning_hpc.commands.training_loader import TrainingLoader, make_training_loader, place_of
from lightning_hpc.report.whole_file import write_whole

SUMMARY = "measure how many workers a DataModule needs, with DataLoader and SharedMemoryLoader"

_SOURCES = (LightningDataModule, DataLoader)


def make_parser() -> ArgumentParser:
    """The arguments of the subcommand."""
    parser = ArgumentParser(
        description="Measures how fast your training data can be read with each number of workers, by DataLoader and by"
        " SharedMemoryLoader in turns (A B B A): how many workers are enough, whether SharedMemoryLoader is faster,"
        " and whether decoding takes the time. Example: lightning-hpc bench data --data my_package.MyDataModule"
        " --data.batch_size 64"
    )
    add_class(
        parser,
        "data",
        _SOURCES,
        "class path of a LightningDataModule, such as my_package.MyDataModule, or of a function that is annotated to"
        " return a DataLoader; its arguments as --data.NAME VALUE. It is set up as for a fit on one device, and its"
        " training loader is measured, with all of its arguments but num_workers",
    )
    parser.add_argument(
        "--workers",
        type=NonNegativeInt,
        nargs="+",
        default=default_workers(usable_processors()),
        metavar="N",
        help="numbers of workers to compare; if not given, 0, 1, 2, 4, … up to the processors that this process has",
    )
    _add_limits(parser)
    parser.add_argument(
        "--step-ms",
        type=Positive,
        default=None,
        metavar="MS",
        help="let a step of your training, of that length, follow each batch: how many workers until the step does not"
        " wait? The processor is free meanwhile, as while a GPU computes. If not given, the next batch is asked for at"
        " once",
    )
    add_output(parser, "all trials and the environment")
    return parser


def _add_limits(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=Positive,
        default=3.0,
        metavar="S",
        help="a trial, which is one loader with one number of workers in one round, ends so long after its first batch;"
        " up to half of it is warm-up, and at least one batch is timed",
    )
    parser.add_argument(
        "--batches",
        type=PositiveInt,
        default=None,
        metavar="N",
        help="a trial ends after so many timed batches, if that is sooner",
    )
    parser.add_argument("--rounds", type=PositiveInt, default=3, help="trials of each; several show the spread")


def run(options: Namespace) -> None:
    """Measures, prints, and writes the files.

    Raises:
        SystemExit: With the way out, if there is no loader to measure, or none could be measured.
    """
    outputs = check_outputs("bench data", options.output)
    if options.data is None:
        refuse(
            "bench data",
            "what is to be read? Name the class of your LightningDataModule: --data my_package.MyDataModule, and its"
            " arguments: --data.NAME VALUE",
        )
    try:
        data = instantiate(options, "data", _SOURCES)
    except Exception as error:
        refuse(
            "bench data",
            f"--data {options.data.class_path} cannot be made: {error}. Give its arguments as --data.NAME VALUE",
        )
    try:
        bench = _Bench(options, data)
        bench.measure(outputs)
        bench.finish(outputs)
    finally:
        if isinstance(data, LightningDataModule):
            data.teardown("fit")


def default_workers(processors: int) -> list[int]:
    """0, 1, 2, 4, … up to the number of processors."""
    return [0, *(2**power for power in range(processors.bit_length()))]


class _Bench:
    """The measurement."""

    def __init__(self, options: Namespace, data: LightningDataModule | DataLoader[Any]) -> None:
        self._options = options
        self._workers = sorted(set(options.workers))
        self._limits = ReadLimits(options.seconds, options.batches, (options.step_ms or 0.0) / 1e3)
        self._loader, self._remarks = self._find(data)
        keys = [(name, workers) for workers in self._workers for name in self._loader.names]
        self._reads: dict[tuple[str, int], list[TimedRead]] = {key: [] for key in keys}
        self._errors: dict[tuple[str, int], str] = {}
        self._first = self._look()

    def measure(self, outputs: Sequence[Path]) -> None:
        """Runs all rounds. What fails once is not tried again."""
        rounds, keys = self._options.rounds, list(self._reads)
        _say(f"{rounds} rounds of {len(keys)} trials, each of {self._options.seconds:g} s at most and its start")
        for number in range(rounds):
            for key in keys if number % 2 == 0 else reversed(keys):
                if key not in self._errors:
                    self._measure(*key, f"round {number + 1}/{rounds} {key[0]} num_workers={key[1]}")
                    self._save(outputs)

    def finish(self, outputs: Sequence[Path]) -> None:
        """Shows the results.

        Raises:
            SystemExit: If there are none.
        """
        view = self._view(is_complete=True)
        if not view.results:
            lines = "\n".join(f"  {name}, {count} workers: {text}" for (name, count), text in self._errors.items())
            refuse("bench data", f"no loader could be measured:\n{lines}")
        view.print()
        write_outputs(outputs, {".json": view.to_json, ".svg": view.to_svg, ".html": view.to_html})

    def _find(self, data: LightningDataModule | DataLoader[Any]) -> tuple[TrainingLoader, list[str]]:
        try:
            return make_training_loader(data)
        except (RuntimeError, TypeError) as error:
            refuse("bench data", f"--data {self._options.data.class_path}: {error}")

    def _look(self) -> TimedRead:
        """Reads one batch, in which the user's own faults show at once."""
        workers = self._workers[0]
        _say(f"reading the first batch with num_workers={workers}")
        try:
            return timed_read(partial(self._loader.make, PEER, workers), ReadLimits(1e-9, 1))
        except TooFewBatchesError as error:
            refuse("bench data", f"--data {self._options.data.class_path}: {error}")
        except Exception as error:
            refuse(
                "bench data",
                f"--data {self._options.data.class_path}: its first batches cannot be read: {_last_line(error)}"
                f" ({place_of(error)}). To see more: next(iter(YOUR_DATA.train_dataloader()))",
            )

    def _measure(self, name: str, workers: int, title: str) -> None:
        try:
            trial = timed_read(partial(self._loader.make, name, workers), self._limits)
        except Exception as error:
            self._errors[name, workers] = _last_line(error)
            _say(f"{title}: failed: {_last_line(error)}")
            return
        self._reads[name, workers].append(trial)
        _say(f"{title}: {format_rate(trial.samples / trial.seconds)} samples/s")

    def _view(self, is_complete: bool) -> DataView:
        return DataView(self._facts(), self._remarks, self._reads, self._errors, is_complete)

    def _facts(self) -> dict[str, Any]:
        return {
            "processors": usable_processors(),
            **versions(),
            "data": self._options.data.class_path,
            "loader": self._loader.kind.__name__,
            "dataset": type(self._loader.dataset).__name__,
            "batch_samples": self._first.samples // self._first.batches,
            "batch_bytes": self._first.bytes // self._first.batches,
            "workers": self._workers,
            "seconds": self._options.seconds,
            "batches": self._options.batches,
            "rounds": self._options.rounds,
            "step_ms": self._options.step_ms,
        }

    def _save(self, outputs: Sequence[Path]) -> None:
        """Writes what there is so far: a later trial may end the process, where memory is short."""
        for path in outputs:
            if path.suffix == ".json":
                write_whole(path, self._view(is_complete=False).to_json())


def _last_line(error: Exception) -> str:
    """What was raised; a worker's error has its traceback, and the type's name, before that."""
    name = type(error).__name__
    last = str(error).strip().rpartition("\n")[2]
    return last if last.startswith(name) else f"{name}: {last}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 (a command's output)
