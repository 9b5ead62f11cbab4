"""`Trainer(strategy="hpc")`: DDP whose gradients are reduced level by level over the topology of the cluster."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hpc.comm.codec_cost import measure_codec
from lightning_hpc.comm.codecs import Codec
from lightning_hpc.comm.exchanges import FeedbackSettings
from lightning_hpc.comm.hook import GradientReducer, reduce_gradients
from lightning_hpc.comm.level_speeds import with_measured_links
from lightning_hpc.comm.probe import probe
from lightning_hpc.comm.stats import CommStats
from lightning_hpc.comm.topology import Topology
from lightning_hpc.comm.tuner import CodecTuner
from lightning_hpc.strategies.arguments import (
    choose_bucket_mib,
    parse_compression,
    parse_mebibytes,
    parse_topology,
    require_known,
    require_sync_batchnorm_device,
)
from lightning_hpc.strategies.codec_checkpoint import (
    load_codec_state,
    make_stamp,
    remove_codec_state,
    save_codec_state,
)

_SLICE_MIB = 4.0


class HPCStrategy(DDPStrategy):
    """DDP with an exact, hierarchical all-reduce: sum within each node, cross the network once, spread again.

    Weights equal those of ``"ddp"`` up to summation order. A node sends 2(N-1)/N times the gradient's bytes a step (N
    nodes), where a flat ring sends 2(P-1)/P times (P ranks; more if ranks are interleaved over nodes). Works on CPU
    with gloo and on CUDA with NCCL. With one process, one node or one domain it is plain DDP, and one line says so.

    Args:
        topology: ``"auto"``: if the launcher (torchrun, SLURM, Lightning) says that there are several nodes, links are
            measured and ranks grouped by them, else plain DDP; ``"flat"`` is plain DDP;
            ranks by node such as ``[[0, 1], [2, 3]]``, which may nest further (racks of nodes); a `Topology`; or the
            path of a saved one.
        compression: ``"none"``: exact. How gradients are packed where they cross the outermost level:
            ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"int3"``, ``"bitmask"``, ``"topk"``, ``"lowrank"``, or
            a `Codec`.
            ``"auto"`` measures what is fastest here: plain DDP, exact sums, bf16, int8, int4 or int3.
        error_feedback: Whether what a codec loses is added to the next step's gradients.
        bucket_cap_mb: Gradients are reduced in buckets of this many MiB while backward still runs; ``"auto"`` is a
            fifth of the model, from 2 to 25, over several nodes, and DDP's own default otherwise.
        slice_mb: MiB of a bucket that move through the levels together; ``"auto"`` is 4.
        **kwargs: Everything `DDPStrategy` and `DistributedDataParallel` take. A ``ddp_comm_hook`` replaces the
            hierarchy, on every device.

    Attributes:
        comm_stats: What the current or last ``fit`` sent, by level, and how long its steps waited for it. None where
            your own ``ddp_comm_hook`` reduces the gradients, since nobody measures it.

    Raises:
        TypeError: If an argument has an unknown name.
        ValueError: If an argument is not one of the above. That the topology covers all processes is checked when the
            Trainer is made, before it starts any.
    """

    def __init__(
        self,
        topology: str | Path | Sequence[Any] | Topology = "auto",
        compression: str | Codec = "none",
        error_feedback: bool = True,
        bucket_cap_mb: float | Literal["auto"] = "auto",
        slice_mb: float | Literal["auto"] = "auto",
        **kwargs: Any,
    ) -> None:
        require_known(kwargs, (HPCStrategy.__init__, DDPStrategy.__init__, DistributedDataParallel.__init__))
        super().__init__(**kwargs)
        self._codecs = parse_compression(compression)
        self._compression = compression if isinstance(compression, str) else compression.name
        if not isinstance(error_feedback, bool):
            raise TypeError(f"error_feedback={error_feedback!r} must be True or False")
        self._is_tuned = isinstance(compression, str) and compression == "auto"
        self._error_feedback = error_feedback
        self._topology = parse_topology(topology)
        cap = parse_mebibytes("bucket_cap_mb", bucket_cap_mb)
        if cap is not None:
            self._ddp_kwargs["bucket_cap_mb"] = cap
        self._has_own_buckets = cap is not None or "bucket_cap_mb_list" in kwargs
        self._slice_mb = parse_mebibytes("slice_mb", slice_mb)
        self._reducer: GradientReducer | None = None
        self._tuner: CodecTuner | None = None
        self._codec_state: dict[str, Any] = {}
        self.comm_stats: CommStats | None = CommStats()
        if self._ddp_comm_hook is not None and isinstance(self._topology, Topology):
            raise ValueError(
                f"topology={self._topology} and ddp_comm_hook={self._ddp_comm_hook!r} exclude each other, since"
                " DistributedDataParallel takes one communication hook; leave one of the two out"
            )

    def __repr__(self) -> str:
        # What a `pytorch_lightning.Trainer` quotes when it refuses the object as an "invalid strategy name".
        return f"<HPCStrategy topology={self._topology}; for lightning.pytorch.Trainer, not pytorch_lightning.Trainer>"

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        # The Trainer calls this when it is made, with devices and nodes known and no process started yet.
        if self.accelerator is not None and not isinstance(self.accelerator, (CPUAccelerator, CUDAAccelerator)):
            name = type(self.accelerator).__name__
            raise ValueError(
                f"HPCStrategy runs on CPU and CUDA, got accelerator={name}; use accelerator='cpu' or 'cuda'"
            )
        if isinstance(self._topology, Topology):
            self._topology.require_world_size(self.num_nodes * self.num_processes)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync is not None:
            assert self.model is not None
            require_sync_batchnorm_device(self.model, self.root_device)
        super().setup(trainer)

    @override
    def configure_ddp(self) -> None:
        topology = self._agreed_topology = self._agree_on_topology()
        self._set_buckets(is_flat=topology.depth == 1)
        super().configure_ddp()
        self.comm_stats = CommStats() if self._ddp_comm_hook is None else None
        if self.comm_stats is not None and self.world_size > 1:
            self._register_hook(topology, self.comm_stats)
        rank_zero_info(self._announcement(topology))

    @override
    def _register_ddp_hooks(self) -> None:
        # The one override of a private method: Lightning's own registers a user's hook on CUDA only and drops it
        # silently elsewhere (Lightning#6736, #8346).
        assert isinstance(self.model, DistributedDataParallel)
        _register_ddp_comm_hook(
            model=self.model,
            ddp_comm_state=self._ddp_comm_state,
            ddp_comm_hook=self._ddp_comm_hook,
            ddp_comm_wrapper=self._ddp_comm_wrapper,
        )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._follow_choice_with_buckets()
        return super().training_step(*args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | torch.nn.Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.comm_stats is not None:
            self.comm_stats.steps += 1
        if self._tuner is not None:
            self._tuner.finish_step()
        return output

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        if self._reducer is not None:
            self._codec_state = self._reducer.state_dict()
        if self._codec_state and self._codecs and "optimizer_states" in checkpoint:
            stamp = make_stamp(self._agreed_topology, self._codecs, checkpoint["global_step"])
            save_codec_state(self._codec_state, stamp, self.global_rank, checkpoint, str(filepath), self.checkpoint_io)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        self._loaded_from = str(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # The one call that says that training resumes, after the hook was registered.
        super().load_optimizer_state_dict(checkpoint)
        if self._reducer is not None:
            stamp = make_stamp(self._agreed_topology, self._codecs, checkpoint["global_step"])
            load_codec_state(self._reducer, stamp, self.global_rank, checkpoint, self._loaded_from, self)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:
            remove_codec_state(str(filepath), self.checkpoint_io)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        # Where Lightning advises another `ddp`, the user wants another `hpc`.
        exception.args = tuple(
            text.replace("'ddp_find", "'hpc_find").replace("DDPStrategy(find", "HPCStrategy(find")
            if isinstance(text, str)
            else text
            for text in exception.args
        )

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._reducer is not None:
            # For a checkpoint after the fit.
            self._codec_state = self._reducer.state_dict() if self._codecs else {}
            self._reducer.close()
            self._reducer = self._tuner = None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers ``"hpc"`` and the variants that ``"ddp"`` has."""
        strategy_registry.register(
            "hpc_compressed",
            cls,
            description="'hpc' with gradients compressed where that is faster",
            compression="auto",
        )
        for variant, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
            strategy_registry.register(
                f"hpc{variant}",
                cls,
                description=f"DDP with a hierarchical all-reduce, start method '{start_method}'",
                start_method=start_method,
            )
            for find_unused in (False, True):
                strategy_registry.register(
                    f"hpc{variant}_find_unused_parameters_{str(find_unused).lower()}",
                    cls,
                    description=f"As 'hpc{variant}', with find_unused_parameters={find_unused}",
                    start_method=start_method,
                    find_unused_parameters=find_unused,
                )

    def _agree_on_topology(self) -> Topology:
        """The topology of this fit, the same on all ranks: rank 0 decides."""
        if isinstance(self._topology, Topology):
            return self.broadcast(self._topology)
        if self._topology == "flat" or self.world_size == 1:
            return Topology.flat(self.world_size)
        mine = torch.tensor([self.node_rank], device=self.root_device)
        node_ranks = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(node_ranks, mine)
        if len({int(node_rank) for node_rank in node_ranks}) == 1:
            return Topology.flat(self.world_size)
        # The launcher's nodes may share a host, or one may be split over two networks: measure.
        found = probe(device=self.root_device)
        for warning in found.warnings:
            rank_zero_warn(warning)
        if found.topology.depth == 1 and self._codecs:
            # All links are alike, as with one rank a node: nothing to sum before, but codecs can be used everywhere.
            return with_measured_links(Topology.from_lists([[rank] for rank in range(self.world_size)]), found)
        return found.topology

    def _set_buckets(self, *, is_flat: bool) -> None:
        """Sets the size of DistributedDataParallel's buckets to what is best for the flat all-reduce, or the levels."""
        self._is_bucketed_flat = is_flat
        if self._has_own_buckets or self._ddp_comm_hook is not None:
            return
        assert self.model is not None
        self._ddp_kwargs.pop("bucket_cap_mb", None)  # of an earlier choice
        if not is_flat:
            trained = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
            model_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
            self._ddp_kwargs["bucket_cap_mb"] = choose_bucket_mib(model_bytes)

    def _follow_choice_with_buckets(self) -> None:
        """Wraps the module anew where ``compression="auto"`` goes to plain DDP, or leaves it."""
        if self._tuner is None or self._reducer is None or self._has_own_buckets:
            return
        assert isinstance(self.model, DistributedDataParallel)
        is_flat = self._reducer.codec == "ddp"
        # While gradients accumulate, Lightning holds this very object in `no_sync`.
        if is_flat == self._is_bucketed_flat or not self.model.require_backward_grad_sync:
            return
        module = self.model = self.model.module  # frees the old buckets before there are new ones
        self._set_buckets(is_flat=is_flat)
        settings = self._ddp_kwargs
        self._ddp_kwargs = {**settings, "init_sync": False}  # the ranks are equal: do not send the model again
        self.model = self._setup_model(module)
        self._ddp_kwargs = settings
        self.model.register_comm_hook(self._reducer, reduce_gradients)

    def _register_hook(self, topology: Topology, stats: CommStats) -> None:
        """Registers the gradient hook, on every device."""
        assert isinstance(self.model, DistributedDataParallel)
        slice_bytes = int((self._slice_mb or _SLICE_MIB) * 2**20)
        self._reducer = GradientReducer(
            topology,
            device=self.root_device,
            slice_bytes=slice_bytes,
            timeout=self._timeout,
            stats=stats,
            parameters=dict(self.model.module.named_parameters()),
            codecs=copy.deepcopy(self._codecs),  # what they learn belongs to this fit
            feedback=FeedbackSettings(
                self._error_feedback, spares_idle=bool(self._ddp_kwargs.get("find_unused_parameters"))
            ),
        )
        if topology.depth > 1 and self._is_tuned:
            self._tuner = self._make_tuner(self._reducer, topology, slice_bytes, stats)
        elif topology.depth > 1 and self._codecs:
            self._reducer.use(self._codecs[0].name)
        self.model.register_comm_hook(self._reducer, reduce_gradients)

    def _make_tuner(
        self, reducer: GradientReducer, topology: Topology, slice_bytes: int, stats: CommStats
    ) -> CodecTuner:
        if not topology.links:
            topology = with_measured_links(topology, probe(device=self.root_device))
        specs = list(reducer.specs.values())
        assert dist.group.WORLD is not None
        return CodecTuner(
            reducer,
            topology=topology,
            costs=[measure_codec(codec, specs, self.root_device) for codec in self._codecs],
            slice_numel=slice_bytes // 4,
            group=dist.group.WORLD,
            device=self.root_device,
            stats=stats,
            announce=lambda reason: rank_zero_info(f"HPCStrategy: compression='auto': {reason}"),
        )

    def _announcement(self, topology: Topology) -> str:
        if self.world_size == 1:
            return "HPCStrategy: one process, so there is nothing to reduce; this is plain DDP."
        if self._ddp_comm_hook is not None:
            return "HPCStrategy: your ddp_comm_hook reduces the gradients, the hierarchy is off."
        if topology.depth == 1:
            source = f" by topology={self._topology!r}" if isinstance(self._topology, str) else ""
            unused = f", and compression={self._compression!r} has no effect" if self._codecs else ""
            return f"HPCStrategy: all {self.world_size} ranks are in one domain{source}; this is plain DDP{unused}."
        packed = f", compression {self._compression!r} between them" if self._codecs else ""
        return (
            f"HPCStrategy: hierarchical all-reduce over {len(topology.nodes)} nodes, ranks by node {topology}{packed}."
        )
