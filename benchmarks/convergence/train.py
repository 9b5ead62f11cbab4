"""Trains the examples' models to the end with `ddp` and lossy codecs, by several seeds, and says which are as good.

python benchmarks/convergence/train.py --task digits lm --strategies bf16 fp16 int8 int4 int3 auto --output found.json

Two processes on two emulated nodes of one rank each, the real Trainer and the real strategy. A seed gives every
strategy the same initial weights, batches and dropout. The links are unshaped, except under `auto`: theirs are so slow
that a lossy codec is what pays. At the end both ranks share the whole held-out set: the 2 % of the language model's
data, and the digits' validation and test images; loss in nats, accuracy of the next byte or of the digit.

The verdict on a strategy, for each task and metric: `inside` if its mean over the seeds lies within the least to most
of `ddp`'s own seeds; else `better` or `worse`. Beside it the differences from `ddp`, seed by seed: mean, standard
deviation, and t, their mean over its standard error. Exit status 1 if one is `worse`.

Results are written after every training, with the settings; with the same ``--output`` a stopped run goes on, and more
strategies or seeds are added. Needs root, as the cluster does.
"""

import argparse
import faulthandler
import itertools
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.cluster import Cluster, ClusterRunError, ClusterUnavailableError
from examples.digits import DigitReader, Digits
from examples.language_model import LanguageModel, StandardLibrary
from lightning_hpc.comm.codecs import CODEC_NAMES
from lightning_hpc.commands.timed_fit import ONLY_TRAINING
from lightning_hpc.strategies import HPCStrategy

FORMAT = "lightning_hpc.convergence/1"
PEER = "ddp"
METRICS = ("loss", "accuracy")
_SCORED_AT_ONCE = 64  # samples
_START_S = 120.0  # for torch and the process group, at the start of the processes


@dataclass(frozen=True)
class Training:
    """What is trained, how, and by which seed."""

    task: str
    strategy: str
    seed: int


@dataclass(frozen=True)
class Result:
    """One training.

    Attributes:
        training: Which.
        loss: Mean cross-entropy over the held-out set, in nats.
        accuracy: Share of the held-out set that is predicted right.
        steps: Optimizer steps.
        seconds: What training and scoring took.
        buckets: Gradient buckets of rank 0 by the codec that sent them; nothing under `ddp`.
        choices: What `auto` decided, one after the other.
    """

    training: Training
    loss: float
    accuracy: float
    steps: int
    seconds: float
    buckets: dict[str, int]
    choices: list[str]


@dataclass(frozen=True)
class Comparison:
    """One strategy against `ddp`, by one metric.

    Attributes:
        values: Of the seeds that both have, in their order.
        verdict: ``"inside"``, ``"better"`` or ``"worse"``.
        differences: From `ddp`'s value of the same seed.
    """

    values: list[float]
    verdict: str
    differences: list[float]

    @property
    def t(self) -> float | None:
        """Mean of the differences over its standard error; None where they do not vary."""
        deviation = spread(self.differences)
        return statistics.mean(self.differences) / deviation * len(self.differences) ** 0.5 if deviation else None


class LanguageTask:
    """The example's language model of 3.3 million parameters."""

    rate_mbit = 200.0
    """Of the links under `auto`: 13 MB of gradients take half a second as they are."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.context, self.batch_size = arguments.context, arguments.batch_size
        self.length = {"max_steps": arguments.steps}

    def make(self) -> tuple[LightningModule, LightningDataModule]:
        """A new model, and its data."""
        return LanguageModel(context=self.context), StandardLibrary(self.context, self.batch_size)

    def predict(self, model: Any, data: Any, share: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits ``[n, 256]`` and bytes ``[n]`` of a share of the held-out windows."""
        for windows in torch.stack(list(data.val)).long()[share].split(_SCORED_AT_ONCE):
            yield model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()


class DigitsTask:
    """The example's CNN of 0.15 million parameters."""

    rate_mbit = 20.0
    """Of the links under `auto`: 0.6 MB of gradients take a quarter of a second as they are."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.length = {"max_epochs": arguments.epochs}

    def make(self) -> tuple[LightningModule, LightningDataModule]:
        """A new model, and its data."""
        return DigitReader(), Digits(batch_size=16)

    def predict(self, model: Any, data: Any, share: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits ``[n, 10]`` and digits ``[n]`` of a share of the images that nothing was trained on."""
        images, labels = (torch.stack(part)[share] for part in zip(*data.val, *data.test, strict=True))
        yield model.network(images), labels


TASKS: dict[str, type[LanguageTask | DigitsTask]] = {"lm": LanguageTask, "digits": DigitsTask}


class FinalScore(Callback):
    """Gives each rank its own randomness, and scores the trained model while the ranks can still talk."""

    def __init__(self, task: LanguageTask | DigitsTask, data: LightningDataModule, seed: int) -> None:
        self._task, self._data, self._seed = task, data, seed
        self.loss, self.accuracy = 0.0, 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Whatever a strategy drew while it was set up, dropout is the same for all of them.
        torch.manual_seed(self._seed * trainer.world_size + trainer.global_rank)

    @override
    @torch.no_grad()
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.eval()
        sums = torch.zeros(3, dtype=torch.float64)
        share = slice(trainer.global_rank, None, trainer.world_size)
        for logits, targets in self._task.predict(pl_module, self._data, share):
            loss = F.cross_entropy(logits, targets, reduction="sum")
            sums += torch.stack([loss, (logits.argmax(1) == targets).sum(), torch.tensor(len(targets))])
        dist.all_reduce(sums)
        self.loss, self.accuracy = (sums[:2] / sums[2]).tolist()


def train(training: Training, arguments: argparse.Namespace) -> Result:
    """Trains one model and scores it. A collective over both ranks."""
    started = time.perf_counter()
    seed_everything(training.seed, verbose=False)
    task = TASKS[training.task](arguments)
    model, data = task.make()
    score = FinalScore(task, data, training.seed)
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    compression = training.strategy
    trainer = Trainer(
        strategy=PEER if compression == PEER else HPCStrategy(topology=[[0], [1]], compression=compression),
        accelerator="cpu",
        devices=local_world_size,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local_world_size,
        callbacks=[score],
        **ONLY_TRAINING,
        **task.length,
    )
    trainer.fit(model, data)
    stats = getattr(trainer.strategy, "comm_stats", None)
    return Result(
        training,
        score.loss,
        score.accuracy,
        trainer.global_step,
        time.perf_counter() - started,
        buckets=dict(stats.codecs) if stats is not None else {},
        choices=[decision.choice for decision in stats.decisions] if stats is not None else [],
    )


def work(trainings: Iterable[Training], arguments: argparse.Namespace) -> None:
    """What each rank runs: trains one after the other; rank 0 writes the results."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    for training in trainings:
        faulthandler.dump_traceback_later(arguments.timeout_s, exit=True)
        result = train(training, arguments)
        faulthandler.cancel_dump_traceback_later()
        if os.environ["RANK"] == "0":
            results = [*read(arguments), result]
            write(results, arguments)
            print(progress(result, results, plan(arguments)), flush=True)


def progress(last: Result, results: list[Result], planned: list[Training]) -> str:
    """What was found last, and how long the rest will take if it goes on like this."""
    done = {result.training for result in results}
    seconds = {training.task: last.seconds for training in planned}
    seconds |= {
        task: statistics.mean(result.seconds for result in results if result.training.task == task)
        for task in {training.task for training in done}
    }
    left = [training for training in planned if training not in done]
    return (
        f"{len(planned) - len(left)}/{len(planned)} {last.training.task} {last.training.strategy}"
        f" seed {last.training.seed}: loss {last.loss:.4f}, accuracy {last.accuracy:.4f}, {last.steps} steps,"
        f" {last.seconds:.0f} s; about {sum(seconds[training.task] for training in left) / 60:.0f} min left"
    )


def plan(arguments: argparse.Namespace) -> list[Training]:
    """All trainings, with those together that need the same links, and each seed with all its strategies."""
    trainings = [
        Training(task, strategy, seed)
        for task in arguments.task
        for seed in range(1, arguments.seeds + 1)
        for strategy in (PEER, *arguments.strategies)
    ]
    return sorted(trainings, key=lambda training: (arguments.task.index(training.task), training.strategy == "auto"))


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What results must have in common to be compared."""
    names = ("steps", "context", "batch_size", "epochs")
    return {**{name: getattr(arguments, name) for name in names}, "torch": str(torch.__version__)}


def read(arguments: argparse.Namespace) -> list[Result]:
    """The results that are there already.

    Raises:
        ValueError: If they were found with other settings.
    """
    if not arguments.output.exists():
        return []
    content = json.loads(arguments.output.read_text(encoding="utf-8"))
    if content["settings"] != settings(arguments):
        raise ValueError(
            f"{arguments.output} was written with {content['settings']}, not with {settings(arguments)}; name another"
            " --output"
        )
    return [Result(**{**one, "training": Training(**one["training"])}) for one in content["results"]]


def write(results: list[Result], arguments: argparse.Namespace) -> None:
    """Writes all results and what follows from them, or leaves the file as it was."""
    tasks = dict.fromkeys(result.training.task for result in results)
    compared = {task: {metric: to_json(compare(results, task, metric)) for metric in METRICS} for task in tasks}
    content = {
        "format": FORMAT,
        "settings": settings(arguments),
        "comparisons": compared,
        "results": [asdict(result) for result in results],
    }
    draft = arguments.output.with_name(arguments.output.name + ".new")
    draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draft.replace(arguments.output)


def to_json(compared: dict[str, Comparison]) -> dict[str, dict[str, Any]]:
    """By strategy."""
    return {strategy: {**asdict(found), "t": found.t} for strategy, found in compared.items()}


def compare(results: list[Result], task: str, metric: str) -> dict[str, Comparison]:
    """Each strategy of a task against all seeds of `ddp`; empty without any of these."""
    by_strategy: dict[str, dict[int, float]] = {}
    for result in results:
        if result.training.task == task:
            by_strategy.setdefault(result.training.strategy, {})[result.training.seed] = getattr(result, metric)
    peer = by_strategy.get(PEER, {})
    compared = {}
    for strategy, by_seed in by_strategy.items():
        seeds = sorted(by_seed.keys() & peer.keys())
        if seeds:
            values = [by_seed[seed] for seed in seeds]
            verdict = judge(statistics.mean(values), list(peer.values()), metric)
            compared[strategy] = Comparison(values, verdict, [by_seed[seed] - peer[seed] for seed in seeds])
    return compared


def judge(mean: float, peer: list[float], metric: str) -> str:
    """Whether a mean lies inside the spread of the peer's values; a mean that is not a number is worse."""
    if min(peer) <= mean <= max(peer):
        return "inside"
    return "better" if (mean < min(peer) if metric == "loss" else mean > max(peer)) else "worse"


def spread(values: list[float]) -> float:
    """Standard deviation; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def show(results: list[Result], task: str, metric: str) -> None:
    """Prints the table of one task and metric."""
    print(f"\n{task}, {metric} on the held-out set")
    print(f"{'strategy':<9} {'mean':>8} {'sd':>7}  verdict  less ddp: mean      sd      t  seed by seed")
    for strategy, found in compare(results, task, metric).items():
        mean, difference = statistics.mean(found.values), statistics.mean(found.differences)
        t = f"{found.t:6.2f}" if found.t is not None else f"{'-':>6}"
        print(
            f"{strategy:<9} {mean:8.4f} {spread(found.values):7.4f}  {found.verdict:<7}  {difference:+14.4f}"
            f" {spread(found.differences):7.4f} {t}  {' '.join(f'{value:.4f}' for value in found.values)}"
        )


def show_choices(results: list[Result], task: str) -> None:
    """Prints which codecs sent the buckets under `auto`, and what it chose in how many trainings."""
    tuned = [result for result in results if result.training.task == task and result.training.strategy == "auto"]
    buckets: Counter[str] = sum((Counter(result.buckets) for result in tuned), Counter())
    last = Counter(result.choices[-1] for result in tuned if result.choices)
    for name, count in buckets.most_common():
        print(f"auto: {name} sent {count / buckets.total():.1%} of the buckets, last choice of {last[name]} trainings")


def run(arguments: argparse.Namespace) -> None:
    """Trains what is missing, on the emulated nodes."""
    done = {result.training for result in read(arguments)}
    missing = [training for training in plan(arguments) if training not in done]
    with Cluster(nodes=2, ranks_per_node=1, rate_mbit=None) as cluster:
        for rate, group in itertools.groupby(missing, key=link_rate):
            trainings = list(group)
            cluster.set_rate(rate)
            command = [sys.executable, *sys.argv, "--trainings", json.dumps([asdict(one) for one in trainings])]
            with redirect_stdout(sys.stderr):
                cluster.run(command, timeout_s=_START_S + arguments.timeout_s * len(trainings), stream=True)


def link_rate(training: Training) -> float | None:
    """Rate of the links for a training in Mbit/s; None is unshaped."""
    return TASKS[training.task].rate_mbit if training.strategy == "auto" else None


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lossy = ["bf16", "fp16", "int8", "int4", "int3", "auto"]
    parser.add_argument("--task", nargs="+", choices=TASKS, default=["digits", "lm"], help="default: digits lm")
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=["none", *CODEC_NAMES, "auto"],
        default=lossy,
        metavar="COMPRESSION",
        help=f"what to compare with ddp: none, {', '.join(CODEC_NAMES)}, auto (default: {' '.join(lossy)})",
    )
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="of the language model (default: %(default)s)")
    parser.add_argument("--context", type=int, default=32, help="bytes a sample (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="samples a step and rank (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=12, help="of the digits (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=900, help="of one training (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the results, which may be there")
    parser.add_argument("--trainings", type=json.loads, help=argparse.SUPPRESS)  # what a rank is to do
    arguments = parser.parse_args(argv)
    if arguments.seeds < 2:
        parser.error(f"--seeds {arguments.seeds}: at least 2, since the spread of the seeds is what counts")
    try:
        read(arguments)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main() -> int:
    """The command line; returns the exit status."""
    arguments = parse()
    if arguments.trainings is not None:
        work((Training(**one) for one in arguments.trainings), arguments)
        return 0
    try:
        run(arguments)
    except (ClusterUnavailableError, ClusterRunError) as error:
        print(f"{error}\nwhat was trained is in {arguments.output}", file=sys.stderr)
        return 2
    results = read(arguments)
    for task in arguments.task:
        for metric in METRICS:
            show(results, task, metric)
        show_choices(results, task)
    verdicts = [one.verdict for task in arguments.task for m in METRICS for one in compare(results, task, m).values()]
    return int("worse" in verdicts)


if __name__ == "__main__":
    sys.exit(main())
