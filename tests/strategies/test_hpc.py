"""The invariant: `hpc` trains as `ddp` does, whatever the setting, and all ranks hold the same bits."""

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.probe_result import ProbeResult
from lightning_hpc.comm.topology import Topology
from lightning_hpc.strategies import HPCStrategy
from lightning_hpc.strategies import hpc as hpc_module
from tests.helpers import run_ranks
from tests.strategies.models import Adversaries, Classifier, loader

NODES = {2: [[0], [1]], 4: [[0, 1], [2, 3]]}
# Many buckets and slices although the model is small.
SMALL = {"bucket_cap_mb": 0.005, "slice_mb": 0.001}


def make_trainer(strategy: DDPStrategy | str, world_size: int, **kwargs: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "max_steps": 20,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
    }
    return Trainer(accelerator="cpu", devices=world_size, strategy=strategy, **{**defaults, **kwargs})


def weights(model: pl.LightningModule) -> Tensor:
    # Parameters only: the running statistics of batch norm are each rank's own until the next forward, as in DDP.
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def fit(model: pl.LightningModule, trainer: Trainer, **kwargs: Any) -> Tensor:
    trainer.fit(model, loader(), **kwargs)
    return weights(model)


def relative_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _ddp_and_hpc(
    rank: int, world_size: int, model: type, model_kwargs: dict, ddp_kwargs: dict, trainer_kwargs: dict
) -> tuple[Tensor, Tensor, list[int], dict[str, int]]:
    results = []
    strategies = (
        DDPStrategy(**ddp_kwargs),
        HPCStrategy(topology=NODES[world_size], **SMALL, **ddp_kwargs),
    )
    for strategy in strategies:
        seed_everything(3, verbose=False)
        results.append(fit(model(**model_kwargs), make_trainer(strategy, world_size, **trainer_kwargs)))
    stats = strategies[1].comm_stats
    return results[0], results[1], [stats.steps, stats.reductions], stats.bytes_sent


SCENARIOS: dict[str, tuple[type, dict, dict, dict]] = {
    "plain": (Classifier, {}, {}, {}),
    "accumulation": (Classifier, {}, {}, {"accumulate_grad_batches": 3}),
    "clipping": (Classifier, {}, {}, {"gradient_clip_val": 0.5}),
    "unused parameters": (Classifier, {"unused": True}, {"find_unused_parameters": True}, {}),
    "static graph": (Classifier, {}, {"static_graph": True}, {}),
    "bucket view": (Classifier, {}, {"gradient_as_bucket_view": True}, {}),
    "bucket view and accumulation": (
        Classifier,
        {},
        {"gradient_as_bucket_view": True},
        {"accumulate_grad_batches": 2},
    ),
    "unused and accumulation": (
        Classifier,
        {"unused": True},
        {"find_unused_parameters": True},
        {"accumulate_grad_batches": 2},
    ),
    "batch norm": (Classifier, {"batch_norm": True}, {}, {}),
    "frozen": (Classifier, {"frozen": True}, {}, {}),
    "sparse": (Classifier, {"sparse": True}, {}, {}),
    "manual": (Adversaries, {}, {"find_unused_parameters": True}, {}),
    "fp64": (Classifier, {}, {}, {"precision": "64-true"}),
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_same_weights_as_ddp(scenario: str, world_size: int) -> None:
    ranks = run_ranks(_ddp_and_hpc, world_size, *SCENARIOS[scenario], init_gloo=False)
    ddp, hpc, _, sent = ranks[0]
    assert relative_difference(hpc, ddp) <= 1e-6
    assert sent["inter_node"] > 0
    for _, other, _, _ in ranks[1:]:
        assert torch.equal(hpc, other)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_low_precision_agrees_within_its_rounding(precision: str) -> None:
    ranks = run_ranks(_ddp_and_hpc, 4, Classifier, {}, {}, {"precision": precision}, init_gloo=False)
    ddp, hpc, _, _ = ranks[0]
    assert relative_difference(hpc, ddp) <= 2**-8
    assert all(torch.equal(hpc, other) for _, other, _, _ in ranks[1:])


def test_steps_and_reductions_are_counted() -> None:
    _, _, counts, sent = run_ranks(
        _ddp_and_hpc, 4, Classifier, {}, {}, {"accumulate_grad_batches": 3}, init_gloo=False
    )[0]
    assert counts == [20, 20]
    _, _, counts, _ = run_ranks(
        _ddp_and_hpc, 2, Adversaries, {}, {"find_unused_parameters": True}, {"max_steps": 8}, init_gloo=False
    )[0]
    assert counts == [8, 8]  # an optimizer step each, two in a batch
    parameters = sum(parameter.numel() for parameter in Classifier().parameters())
    assert abs(sent["inter_node"] / 20 - parameters * 4 / 2) <= 64 * 4  # half of S each for L = N = 2


def _resume(rank: int, world_size: int, folder: str) -> tuple[Tensor, Tensor]:
    def trainer(epochs: int) -> Trainer:
        strategy = HPCStrategy(topology=NODES[world_size], **SMALL)
        return make_trainer(strategy, world_size, max_steps=-1, max_epochs=epochs)

    seed_everything(3, verbose=False)
    straight = fit(Classifier(), trainer(2))
    seed_everything(3, verbose=False)
    first = trainer(1)
    fit(Classifier(), first)
    first.save_checkpoint(f"{folder}/half.ckpt")
    resumed = fit(Classifier(), trainer(2), ckpt_path=f"{folder}/half.ckpt")
    return straight, resumed


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    for straight, resumed in run_ranks(_resume, 4, str(tmp_path), init_gloo=False):
        assert torch.equal(straight, resumed)


def _evaluate(rank: int, world_size: int) -> list[Any]:
    outcomes = []
    for strategy in (DDPStrategy(), HPCStrategy(topology=NODES[world_size])):
        seed_everything(3, verbose=False)
        model, trainer = Classifier(), make_trainer(strategy, world_size, limit_val_batches=1.0)
        trainer.fit(model, loader(), loader())
        predictions = trainer.predict(model, loader())
        assert predictions is not None
        outcomes.append(
            [
                trainer.validate(model, loader(), verbose=False)[0]["val_loss"],
                trainer.test(model, loader(), verbose=False)[0]["val_loss"],
                torch.cat(predictions).tolist(),
            ]
        )
    return outcomes


def test_validate_test_and_predict_after_fit_give_what_ddp_gives() -> None:
    for ddp, hpc in run_ranks(_evaluate, 2, init_gloo=False):
        assert hpc[:2] == pytest.approx(ddp[:2], rel=1e-5)
        assert hpc[2] == ddp[2]


def _fit_line(rank: int, world_size: int, topology: Any, kwargs: dict) -> tuple[str, dict | None, float]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch").addHandler(handler)
    strategy = HPCStrategy(topology=topology, **kwargs)
    trainer = make_trainer(strategy, world_size, max_steps=3)
    fit(Classifier(), trainer)
    said = [line for line in lines if line.startswith("HPCStrategy")]
    stats = strategy.comm_stats
    return " ".join(said), stats and stats.bytes_sent, stats.exposed_seconds if stats else 0.0


@pytest.mark.parametrize(
    ("world_size", "topology", "kwargs", "line", "level"),
    [
        (2, "auto", {}, "all 2 ranks are in one domain by topology='auto'; this is plain DDP", "all_ranks"),
        (2, "flat", {}, "one domain by topology='flat'; this is plain DDP", "all_ranks"),
        (2, [0, 1], {}, "all 2 ranks are in one domain; this is plain DDP", "all_ranks"),
        (2, [[0], [1]], {}, "hierarchical all-reduce over 2 nodes, ranks by node [[0], [1]]", "inter_node"),
        (1, "auto", {}, "one process, so there is nothing to reduce; this is plain DDP", None),
        (2, "auto", {"ddp_comm_hook": allreduce_hook}, "your ddp_comm_hook reduces the gradients", "unknown"),
    ],
)
def test_one_line_says_what_is_done(world_size: int, topology: Any, kwargs: dict, line: str, level: str | None) -> None:
    (said, sent, exposed), *others = run_ranks(_fit_line, world_size, topology, kwargs, init_gloo=False)
    assert line in said
    assert said.count("HPCStrategy") == 1
    if level == "unknown":
        assert sent is None
    else:
        assert sent is not None
        assert set(sent) == ({level} if level else set())
        assert (exposed > 0) == bool(level)
    assert all(other == "" for other, _, _ in others)


def _auto_topology(rank: int, world_size: int, found: list, compression: str) -> tuple[str, dict]:
    os.environ.update(NODE_RANK=str(rank // 2), LOCAL_RANK=str(rank % 2))
    links = [LinkSpeed(1e-5, 1e9)] * Topology.from_lists(found).depth
    hpc_module.probe = lambda device: ProbeResult(Topology.from_lists(found, links))
    strategy = HPCStrategy(compression=compression)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        num_nodes=2,
        strategy=strategy,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    fit(Classifier(), trainer)
    return str(strategy._agree_on_topology()), strategy.comm_stats.bytes_sent


@pytest.mark.parametrize(
    ("found", "compression", "topology", "levels"),
    [
        ([[0, 2], [1, 3]], "none", "[[0, 2], [1, 3]]", {"intra_node", "inter_node"}),
        ([0, 1, 2, 3], "none", "[0, 1, 2, 3]", {"all_ranks"}),
        # All links alike: nothing to sum before, but the codec can be used.
        ([0, 1, 2, 3], "int8", "[[0], [1], [2], [3]]", {"inter_node"}),
    ],
)
def test_auto_takes_the_nodes_that_were_measured(found: list, compression: str, topology: str, levels: set) -> None:
    for used, sent in run_ranks(_auto_topology, 4, found, compression, init_gloo=False):
        assert used == topology
        assert set(sent) == levels


def test_advice_on_unused_parameters_stays_with_hpc() -> None:
    error = RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one.")
    HPCStrategy().on_exception(error)
    assert "'hpc_find_unused_parameters_true'" in str(error)
    assert "ddp" not in str(error)


def test_registered_under_the_family_of_names() -> None:
    variants = ("", "_spawn", "_fork", "_notebook")
    names = {f"hpc{v}{u}" for v in variants for u in ("", *(f"_find_unused_parameters_{b}" for b in ("true", "false")))}
    registered = {name for name in StrategyRegistry if name.startswith("hpc")}
    assert registered == {*names, "hpc_compressed"}
    assert StrategyRegistry.get("hpc_compressed")._is_tuned
    strategy = StrategyRegistry.get("hpc_fork_find_unused_parameters_true")
    assert isinstance(strategy, HPCStrategy)
    assert strategy._ddp_kwargs["find_unused_parameters"] is True
    assert strategy._start_method == "fork"


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ({"compression": "int5"}, "compression='int5' is not available; choose one of: none"),
        ({"topology": "rack.json"}, "'rack.json' is not 'auto', 'flat' or the path of a saved topology"),
        ({"topology": [[0, 1], [1]]}, "rank 1 more than once"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0 must be 'auto' or a positive number of MiB"),
        ({"slice_mb": "large"}, "slice_mb='large' must be 'auto' or a positive"),
        ({"slice_mb": float("nan")}, "slice_mb=nan must be"),
        ({"slice_mb": 1e-9}, "slice_mb=1e-09 must be"),
        ({"bucket_cap_mb": 1e300}, "from a byte to a TiB"),
        ({"topology": Path("rack.json")}, "'rack.json' is not 'auto', 'flat' or the path of a saved topology"),
        ({"topology": [[0], [1]], "ddp_comm_hook": allreduce_hook}, "exclude each other"),
    ],
)
def test_wrong_arguments_are_quoted(kwargs: dict, complaint: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        HPCStrategy(**kwargs)
    assert complaint in str(error.value)


def test_a_misspelt_argument_is_found_at_once() -> None:
    with pytest.raises(TypeError, match="takes no argument 'topolgy'; did you mean 'topology'"):
        HPCStrategy(topolgy=[[0], [1]])
    with pytest.raises(TypeError, match="takes no argument 'colour'"):
        HPCStrategy(colour="blue")


def test_topology_of_another_size_is_refused_before_any_process_starts() -> None:
    with pytest.raises(ValueError, match=r"names 4 of the job's 2 ranks"):
        Trainer(accelerator="cpu", devices=2, strategy=HPCStrategy(topology=[[0, 1], [2, 3]]))
    with pytest.raises(ValueError, match=r"names 4 of the job's 8 ranks"):
        Trainer(accelerator="cpu", devices=2, num_nodes=4, strategy=HPCStrategy(topology=Topology.flat(4)))


def test_unsupported_accelerator_is_named() -> None:
    class XPUAccelerator(pl.accelerators.Accelerator):
        setup_device = teardown = lambda self, *args: None
        parse_devices = staticmethod(lambda devices: devices)
        get_parallel_devices = staticmethod(lambda devices: [torch.device("cpu")] * devices)
        auto_device_count = staticmethod(lambda: 1)
        is_available = staticmethod(lambda: True)
        name = staticmethod(lambda: "xpu")

    with pytest.raises(ValueError, match="runs on CPU and CUDA, got accelerator=XPUAccelerator"):
        Trainer(accelerator=XPUAccelerator(), devices=2, strategy="hpc")


def _sync_batchnorm(rank: int, world_size: int) -> str:
    trainer = make_trainer(HPCStrategy(), world_size, sync_batchnorm=True)
    fit(Classifier(), trainer)  # no batch statistics: nothing to refuse
    try:
        fit(Classifier(batch_norm=True), make_trainer(HPCStrategy(), world_size, sync_batchnorm=True))
    except ValueError as error:
        return str(error)
    return ""


def test_sync_batchnorm_on_cpu_is_refused_with_the_way_out() -> None:
    for message in run_ranks(_sync_batchnorm, 2, init_gloo=False):
        assert "sync_batchnorm=True needs CUDA" in message
        assert "Trainer(sync_batchnorm=False)" in message
