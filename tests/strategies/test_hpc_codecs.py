"""The invariants of compression in training: equal weights on all ranks, and a resumed run that is the same run.

Starting processes is slow, so each function that runs on the ranks trains many times.
"""

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hpc.comm.codecs import CODEC_NAMES, make_codec
from lightning_hpc.comm.codecs.codec import Codec
from lightning_hpc.comm.hook import GradientReducer, reduce_gradients
from lightning_hpc.comm.stats import CommStats
from lightning_hpc.comm.topology import Topology
from lightning_hpc.strategies import HPCStrategy
from tests.comm.exchanges.engine import SignCodec
from tests.helpers import run_ranks
from tests.strategies.models import Adversaries, Classifier, loader
from tests.strategies.test_hpc import SMALL, make_trainer, weights

TWO_BY_TWO = [[0, 1], [2, 3]]
STEPS = 5  # of an epoch


class Watch(Callback):
    """Compares the weights of all ranks after every step, and keeps what the reducer holds at the end."""

    def __init__(self) -> None:
        self.steps = 0
        self.unequal: list[int] = []
        self.state: dict[str, Any] = {}
        self.fallbacks: dict[str, int] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        mine = weights(pl_module)
        others = [torch.empty_like(mine) for _ in range(trainer.world_size)]
        dist.all_gather(others, mine)
        self.steps += 1
        if not all(torch.equal(mine, other) for other in others):
            self.unequal.append(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, HPCStrategy)
        assert strategy._reducer is not None
        assert strategy.comm_stats is not None
        self.state = copy.deepcopy(strategy._reducer.state_dict())
        self.fallbacks = dict(strategy.comm_stats.fallbacks)


def train(
    compression: str | Codec,
    domains: list[Any],
    *,
    model: LightningModule | None = None,
    epochs: int = 1,
    ckpt_path: str | None = None,
    callbacks: list[Callback] | None = None,
    strategy: dict[str, Any] | None = None,
    **trainer_kwargs: Any,
) -> tuple[Tensor, Watch]:
    """Trains from one and the same start, and returns the weights."""
    seed_everything(3, verbose=False)
    watch, model = Watch(), model or Classifier()
    trainer = make_trainer(
        HPCStrategy(topology=domains, compression=compression, **{**SMALL, **(strategy or {})}),
        Topology.from_lists(domains).world_size,
        max_steps=-1,
        max_epochs=epochs,
        limit_train_batches=STEPS,
        callbacks=[watch, *(callbacks or [])],
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks or []),
        **trainer_kwargs,
    )
    trainer.fit(model, loader(), ckpt_path=ckpt_path)
    return weights(model), watch


def checkpoints(folder: str, **kwargs: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{epoch}", **{"save_top_k": -1, **kwargs})


def same_state(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return one.keys() == other.keys() and all(same_state(one[key], other[key]) for key in one)


def _train_and_resume(rank: int, world_size: int, domains: list[Any], folder: str) -> list[str]:
    problems = []
    for compression in (*CODEC_NAMES, SignCodec()):
        name = compression if isinstance(compression, str) else compression.name
        straight, watch = train(compression, domains, epochs=2, callbacks=[checkpoints(f"{folder}/{name}")])
        if watch.unequal or watch.steps != 2 * STEPS:
            problems.append(f"{name}: weights differ after steps {watch.unequal} of {watch.steps}")
        path = f"{folder}/{name}/epoch=0.ckpt"
        if isinstance(compression, SignCodec):
            compression = SignCodec()
        resumed, again = train(compression, domains, epochs=2, ckpt_path=path)
        if again.steps != STEPS or again.unequal:
            problems.append(f"{name}: {again.steps} steps after the resume, weights differ after {again.unequal}")
        if not torch.equal(straight, resumed):
            problems.append(f"{name}: the resumed run ends elsewhere, by {(straight - resumed).abs().max()}")
        if not same_state(watch.state, again.state):
            problems.append(f"{name}: the resumed run ends with another state")
        if watch.fallbacks:
            problems.append(f"{name}: {watch.fallbacks}")
    return problems


@pytest.mark.parametrize("domains", [TWO_BY_TWO, [[0], [1], [2]]], ids=str)
def test_all_ranks_hold_the_same_weights_and_a_resumed_run_is_bit_identical(domains: list[Any], tmp_path: Path) -> None:
    world_size = Topology.from_lists(domains).world_size
    ranks = run_ranks(_train_and_resume, world_size, domains, str(tmp_path), init_gloo=False, timeout=150)
    assert ranks == [[]] * world_size


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2},
    "unused parameters": {"model": (Classifier, {"unused": True}), "strategy": {"find_unused_parameters": True}},
    "unused and accumulation": {
        "model": (Classifier, {"unused": True}),
        "strategy": {"find_unused_parameters": True},
        "accumulate_grad_batches": 2,
    },
    "static graph": {"strategy": {"static_graph": True}},
    "bucket view": {"strategy": {"gradient_as_bucket_view": True}},
    "bucket view and accumulation": {"strategy": {"gradient_as_bucket_view": True}, "accumulate_grad_batches": 2},
    "no bucket view": {"strategy": {"gradient_as_bucket_view": False}},
    "manual": {"model": (Adversaries, {}), "strategy": {"find_unused_parameters": True}},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "fp64": {"precision": "64-true"},
    "sparse": {"model": (Classifier, {"sparse": True})},
    "frozen": {"model": (Classifier, {"frozen": True})},
    "no error feedback": {"strategy": {"error_feedback": False}},
}
# How far the weights may be from those of exact sums after a few steps.
DISTANCES = {"int8": 2e-3, "topk": 0.2, "lowrank": 0.2}


def _settings(rank: int, world_size: int, domains: list[Any]) -> list[str]:
    problems = []
    for setting, kwargs in SETTINGS.items():
        results = {}
        for compression in ("none", *DISTANCES):
            arguments = dict(kwargs)
            seed_everything(5, verbose=False)
            kind, model_kwargs = arguments.pop("model", (Classifier, {}))
            results[compression], watch = train(compression, domains, model=kind(**model_kwargs), **arguments)
            if watch.unequal:
                problems.append(f"{setting}, {compression}: weights differ after steps {watch.unequal}")
        for compression, distance in DISTANCES.items():
            difference = float((results[compression] - results["none"]).norm() / results["none"].norm())
            packed = setting != "fp64" and not (setting == "manual" and compression == "topk")
            if not difference < distance or (difference == 0) == packed:
                problems.append(f"{setting}, {compression}: {difference} from exact sums")
    return problems


def test_every_setting_of_ddp_goes_with_codecs() -> None:
    assert run_ranks(_settings, 2, [[0], [1]], init_gloo=False, timeout=150) == [[], []]


def _resume_from(rank: int, domains: list[Any], path: str) -> tuple[Tensor, list[int], list[str]]:
    """Trains on; returns the weights, the steps where ranks differed, and what was said of the codec state."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after, watch = train("int8", domains, epochs=2, ckpt_path=path)
    assert watch.steps == STEPS
    return after, watch.unequal, [str(w.message) for w in caught if "codec state" in str(w.message)]


def _save(rank: int, world_size: int, domains: list[Any], folder: str) -> None:
    train("int8", domains, callbacks=[checkpoints(folder)])


def _break_and_resume(rank: int, world_size: int, folder: str) -> list[str]:
    train("int8", TWO_BY_TWO, callbacks=[checkpoints(folder)])
    path, files = f"{folder}/epoch=0.ckpt", Path(folder, "codec_state", "epoch=0.ckpt")
    intact, _, said = _resume_from(rank, TWO_BY_TWO, path)
    problems = [f"intact: {said}"] if said else []
    victim = files / "rank_00002.ckpt"
    content = victim.read_bytes()
    dist.barrier()

    def garbage(file: Path) -> None:
        file.write_bytes(b"\x80\x04nonsense")

    def another_pickle(file: Path) -> None:
        torch.save([1, 2], file)

    def of_another_step(file: Path) -> None:
        saved = torch.load(file, weights_only=True)
        torch.save({**saved, "step": saved["step"] + 1}, file)

    def without_state(file: Path) -> None:
        saved = torch.load(file, weights_only=True)
        torch.save({key: value for key, value in saved.items() if key != "state"}, file)

    breakages = {
        "missing": Path.unlink,
        "empty": lambda file: file.write_bytes(b""),
        "a few bytes": lambda file: file.write_bytes(content[:10]),
        "truncated": lambda file: file.write_bytes(content[: len(content) // 2]),
        "garbage": garbage,
        "another pickle": another_pickle,
        "of another step": of_another_step,
        "without state": without_state,
        "a folder": lambda file: (file.unlink(), file.mkdir()),
        "all missing": lambda file: shutil.rmtree(file.parent),
    }
    for name, breakage in breakages.items():
        if rank == 2:
            breakage(victim)
        dist.barrier()
        after, unequal, said = _resume_from(rank, TWO_BY_TWO, path)
        if unequal or len(said) != (rank == 0) or torch.equal(after, intact):
            problems.append(
                f"{name}: weights differ after {unequal}, said {said}, as intact {torch.equal(after, intact)}"
            )
        if rank == 0 and said and "not all ranks found their file" not in said[0]:
            problems.append(f"{name}: {said}")
        dist.barrier()
        if rank == 2 and files.is_dir():
            if victim.is_dir():
                victim.rmdir()
            victim.write_bytes(content)
        dist.barrier()
    return problems


def test_state_that_one_rank_cannot_read_is_dropped_by_all_with_one_warning(tmp_path: Path) -> None:
    assert run_ranks(_break_and_resume, 4, str(tmp_path), init_gloo=False, timeout=150) == [[]] * 4


def _resume_elsewhere(rank: int, world_size: int, topologies: list[Any], path: str) -> list[tuple[Any, ...]]:
    return [_resume_from(rank, domains, path)[1:] for domains in topologies]


def test_state_of_other_ranks_or_nodes_is_dropped_with_one_warning(tmp_path: Path) -> None:
    run_ranks(_save, 4, TWO_BY_TWO, str(tmp_path), init_gloo=False)
    path = str(tmp_path / "epoch=0.ckpt")
    for topologies in ([[[0], [1]]], [[[0], [1, 2, 3]], [[0, 2], [1, 3]]]):
        world_size = Topology.from_lists(topologies[0]).world_size
        ranks = run_ranks(_resume_elsewhere, world_size, topologies, path, init_gloo=False)
        for rank, outcomes in enumerate(ranks):
            for domains, (unequal, said) in zip(topologies, outcomes, strict=True):
                assert not unequal
                assert len(said) == (rank == 0)
                for line in said:
                    assert f"ranks by node [[0, 1], [2, 3]], and now they are {domains}" in line


def _files(folder: str) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file())


def _keep_one(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    domains = [[0], [1]]
    best = checkpoints(f"{folder}/best", save_top_k=1, save_last="link")
    straight, _ = train("int8", domains, epochs=2, callbacks=[best])
    found["files"] = _files(f"{folder}/best")
    last = f"{folder}/best/last.ckpt"
    found["is link"] = Path(last).is_symlink()
    longer, _ = train("int8", domains, epochs=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed, again = train("int8", domains, epochs=3, ckpt_path=last)
    found["said"] = [str(w.message) for w in caught if "codec state" in str(w.message)]
    found["resumes the same run"] = torch.equal(longer, resumed) and again.steps == STEPS

    content = torch.load(last, weights_only=True)
    found["plain"] = sorted(content["lightning_hpc"])

    trainer = make_trainer(HPCStrategy(topology=domains, compression="int8"), 2, limit_val_batches=1.0)
    fresh = Classifier()
    validated = trainer.validate(fresh, loader(), ckpt_path=last, verbose=False)[0]["val_loss"]
    tested = trainer.test(fresh, loader(), ckpt_path=last, verbose=False)[0]["val_loss"]
    found["evaluates"] = validated == tested and torch.equal(weights(fresh), straight)
    loaded = Classifier.load_from_checkpoint(last)
    found["loads"] = torch.equal(weights(loaded), straight)
    return found


def test_files_live_and_die_with_their_checkpoint(tmp_path: Path) -> None:
    for found in run_ranks(_keep_one, 2, str(tmp_path), init_gloo=False):
        assert found == {
            "files": [
                "codec_state/epoch=1.ckpt/rank_00000.ckpt",
                "codec_state/epoch=1.ckpt/rank_00001.ckpt",
                "epoch=1.ckpt",
                "last.ckpt",
            ],
            "is link": True,
            "said": [],
            "resumes the same run": True,
            "plain": ["codecs", "nodes", "step"],
            "evaluates": True,
            "loads": True,
        }


def _scaled(rank: int, world_size: int) -> list[str]:
    """fp16 with a scaler, some steps overflowing on one rank."""
    problems, histories = [], {}
    for compression in ("ddp", "none", *CODEC_NAMES):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 5))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
        reducer = None
        if compression != "ddp":
            reducer = GradientReducer(
                Topology.from_lists([[0], [1]]),
                device=torch.device("cpu"),
                slice_bytes=4096,
                timeout=None,
                stats=CommStats(),
                parameters=dict(model.named_parameters()),
                codecs=[make_codec(compression)] if compression != "none" else [],
            )
            reducer.use(compression)
            ddp.register_comm_hook(reducer, reduce_gradients)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        history = []
        for step in range(10):
            generator = torch.Generator().manual_seed(100 * step + rank)
            inputs = torch.randn(8, 64, generator=generator)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = ddp(inputs).float().square().mean()
            if step in (2, 6) and rank == 1:
                loss = loss * torch.tensor(1e30) * 1e30
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            scaler.step(optimizer)
            scaler.update()
            after = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            history.append((scaler.get_scale(), torch.equal(before, after)))
            others = [torch.empty_like(after) for _ in range(world_size)]
            dist.all_gather(others, after)
            if not all(torch.equal(after, other) for other in others) or not after.isfinite().all():
                problems.append(f"{compression}, step {step}: weights differ or are not finite")
        histories[compression] = history
        if history != histories["ddp"] or sum(skipped for _, skipped in history) != 2:
            problems.append(f"{compression}: {history} against {histories['ddp']}")
        if reducer is not None:
            dist.barrier()
            reducer.close()
    return problems


def test_a_gradient_scaler_skips_the_steps_that_it_skips_under_ddp() -> None:
    assert run_ranks(_scaled, 2) == [[], []]
