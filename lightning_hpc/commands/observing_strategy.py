"""`HPCStrategy` that notes what its steps compute, for the cost model."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hpc.comm.codec_cost import measure_codec
from lightning_hpc.comm.codecs import CODEC_NAMES, make_codec
from lightning_hpc.comm.cost_model import CodecCost, predict_choices
from lightning_hpc.comm.layout import ParameterSpec
from lightning_hpc.comm.step_observer import StepObserver
from lightning_hpc.strategies import HPCStrategy


class ObservingStrategy(HPCStrategy):
    """Takes what `HPCStrategy` takes; notes the steps of a fixed choice. The notes cost some microseconds a step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._observer: StepObserver | None = None

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        if self._reducer is not None and self.comm_stats is not None and self._tuner is None:
            self._observer = StepObserver(self._reducer, self.comm_stats)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | torch.nn.Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._observer is not None:
            self._observer.finish_step()
        return output

    def predict_steps(self, model: torch.nn.Module) -> dict[str, float]:
        """What the cost model says of every choice, in seconds a step, after a fit with a fixed choice.

        Args:
            model: The model that was trained.

        Returns:
            By choice; nothing after other fits, and where the topology has no speeds.
        """
        topology = self._agreed_topology
        workload = self._observer.take_workload() if self._observer is not None else None
        if workload is None or not topology.links or topology.depth == 1:
            return {}
        specs = [
            ParameterSpec.of(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        costs = [CodecCost(), *(measure_codec(make_codec(name), specs, self.root_device) for name in CODEC_NAMES)]
        slice_numel = round((self._slice_mb or 4.0) * 2**18)
        found = predict_choices(workload, topology, costs, slice_numel)
        return {prediction.name: prediction.step_seconds for prediction in found}
