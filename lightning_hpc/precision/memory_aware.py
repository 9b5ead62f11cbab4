"""`MemoryAwarePrecision`: float32 as long as it fits, and lower precision for the modules where that helps most."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_hpc._compiled import is_compiled
from lightning_hpc.comm.background_gather import BackgroundGather
from lightning_hpc.memory.blocks import Blocks
from lightning_hpc.memory.budget_probe import BudgetProbe
from lightning_hpc.memory.default_probe import default_probe
from lightning_hpc.memory.freed_memory import give_back
from lightning_hpc.memory.probe import PressureProbe
from lightning_hpc.precision.precision_map import PrecisionMap
from lightning_hpc.precision.switch import Switch
from lightning_hpc.precision.switch_controller import SwitchController
from lightning_hpc.precision.switch_policy import SwitchPolicy
from lightning_hpc.precision.switch_text import advice, describe, describe_measured
from lightning_hpc.precision.unit_bytes import UnitBytes
from lightning_hpc.precision.units import find_units

KEEP_FLOAT32 = ("*LayerNorm*", "*RMSNorm*", "*GroupNorm*", "*LocalResponseNorm*", "*Softmax*", "*Softmin*", "*Loss*")
# Checks below the low watermark before a module comes back, at first.
_PATIENCE = 10
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Lightning's key for the scaler's state, so that a checkpoint moves between its plugin and this one.
_SCALER_KEY = MixedPrecision.__qualname__


class MemoryAwarePrecision(Precision):
    """Trains in float32, and switches modules to mixed precision while the memory is nearly full.

    Modules are switched whole, those first whose activations take the most bytes, which one step measures. Parameters,
    gradients, optimizer state and all that modules return stay float32. Without pressure, weights are bitwise those of
    ``precision="32-true"``. All ranks switch together, always between two optimizer steps.

    Args:
        dtype: ``"bf16"`` or ``"fp16"``: the low precision. fp16 scales the loss, while a module is low.
        high_watermark: Part of the memory limit above which modules go to low precision.
        low_watermark: Part of it below which they come back, one by one.
        budget_bytes: A limit of your own, in place of what the device has.
        probe: What reads the memory, such as `lightning_hpc.memory.CallableProbe`. None means that of the device.
        modules: Names of the modules or classes that may be switched. None means repeated blocks and what lies beside
            them: see `lightning_hpc.precision.find_units`.
        keep_float32: Patterns of names of modules or classes that compute in float32 inside low modules too.
        check_every_n_steps: Optimizer steps between two readings.

    Attributes:
        switches: What was switched in the current or last fit.
        scaler: The gradient scaler with ``"fp16"``.

    Raises:
        ValueError: If an argument is not one of these; at the start, if ``modules`` does not fit the model, or the
            strategy or LBFGS does not go with it.
    """

    # What the parameters are, and what is computed without pressure.
    precision: Literal["32-true"] = "32-true"

    def __init__(
        self,
        dtype: Literal["bf16", "fp16"] = "bf16",
        high_watermark: float = 0.9,
        low_watermark: float = 0.7,
        budget_bytes: int | None = None,
        probe: PressureProbe | None = None,
        modules: list[str] | None = None,
        keep_float32: Sequence[str] = KEEP_FLOAT32,
        check_every_n_steps: int = 10,
    ) -> None:
        _require_settings(dtype, high_watermark, low_watermark, budget_bytes, check_every_n_steps)
        _require_lists(modules=modules, keep_float32=keep_float32)
        self._dtype = _DTYPES[dtype]
        self._marks = (high_watermark, low_watermark)
        self._budget_bytes = budget_bytes
        self._own_probe = probe
        self._wanted = modules
        self._keep_float32 = tuple(keep_float32)
        self._interval = check_every_n_steps
        self._scaled: MixedPrecision | None = None
        self._foreign_scaler: dict[str, Any] = {}
        self._policy: SwitchPolicy | None = None
        self._module: pl.LightningModule | None = None
        self._map: PrecisionMap | None = None
        self._exchange: BackgroundGather | _Alone | None = None
        self._controller: SwitchController | None = None
        self._controller_state: dict[str, Any] | None = None  # before and after it is there
        self._listeners: list[Callable[[Switch], None]] = []
        self._is_in_step = False
        self._is_scaling = False
        self._unconfirmed: list[Switch] = []
        self._has_advised = False
        self.switches: list[Switch] = []

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What Lightning calls ``trainer.scaler``."""
        return None if self._scaled is None else self._scaled.scaler

    @property
    def low_modules(self) -> list[str]:
        """Names of the modules in low precision, in the order in which they went there."""
        return [] if self._policy is None else list(self._policy.lowered)

    @property
    def measured(self) -> dict[str, UnitBytes]:
        """What each module that may be switched saves for backward, as far as it is measured."""
        return {} if self._policy is None else dict(self._policy.bytes)

    def lower_one_level(self) -> Switch | None:
        """Puts further modules in low precision at once, for a step that runs again because memory has run out.

        To be called between the failed attempt and the next one, on a single rank. Gradients that have been
        accumulated are kept.

        Returns:
            What was switched; None if nothing is left.
        """
        if self._policy is None or self._controller is None:
            return None
        switch = self._policy.lower_one_level()
        if switch is not None:
            self._controller.apply()
            self._tell(switch)
            self._follow_with_scaling(keeps_gradients=True)
        return switch

    def listen(self, listener: Callable[[Switch], None]) -> None:
        """Has ``listener`` called after each switch, on all ranks, up to the end of the fit."""
        self._listeners.append(listener)

    @override
    def convert_module(self, module: Module) -> Module:
        assert isinstance(module, pl.LightningModule)
        self._module = module
        return module

    @override
    def connect(
        self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[Module, list[Optimizer], list[Any]]:
        assert self._module is not None
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self._start(self._module)
        return model, optimizers, lr_schedulers

    @contextmanager
    @override
    def train_step_context(self) -> Generator[None, None, None]:
        if self._map is None:
            yield
            return
        controller = self._begin_step()
        if not controller.wants_measurement:
            yield
            return
        with controller.measured_forward():
            yield

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        if self._scaled is not None and self._is_scaling:
            return self._scaled.pre_backward(tensor, module)
        return super().pre_backward(tensor, module)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self._map is not None and model.automatic_optimization:
            self._begin_step()  # the closure's forward would be too late to choose how the optimizer steps
        if self._scaled is not None and self._is_scaling:
            output = self._scaled.optimizer_step(optimizer, model, closure, **kwargs)
        else:
            output = super().optimizer_step(optimizer, model, closure, **kwargs)
        self._is_in_step = False
        return output

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if self._scaled is not None and self._is_scaling:
            self._scaled.clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        else:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._policy is None:
            return {}
        controller = self._controller_state if self._controller is None else self._controller.state_dict()
        return {**self._policy.state_dict(), "controller": controller}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._policy is None:
            return
        try:
            self._policy.load_state_dict(state_dict)
            self._controller_state = state_dict["controller"]
        except ValueError as error:
            rank_zero_warn(
                f"MemoryAwarePrecision starts anew in float32, since the checkpoint is of another model: {error}"
            )

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = self._foreign_scaler if self._scaled is None else self._scaled.state_dict()
        if state:
            checkpoint[_SCALER_KEY] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get(_SCALER_KEY, {})
        if self._scaled is None:
            self._foreign_scaler = state  # kept for whoever comes after us
        elif state:
            self._scaled.load_state_dict(state)

    @override
    def teardown(self) -> None:
        self._stop()
        self._listeners.clear()

    def _start(self, module: pl.LightningModule) -> None:
        self._stop()  # of a fit that ended without telling
        trainer = module.trainer
        if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise ValueError(
                f"MemoryAwarePrecision works with one device, ddp and hpc, not with {type(trainer.strategy).__name__};"
                ' use precision="bf16-mixed" there'
            )
        if self._dtype is torch.float16 and any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            raise ValueError('dtype="fp16" scales the loss, which does not go with LBFGS; use dtype="bf16"')
        device_type = trainer.strategy.root_device.type
        units = _find(module, self._wanted)
        self._map = PrecisionMap(units.modules, device_type, self._dtype, self._keep_float32)
        self._warn_of_units(units)
        self._policy = SwitchPolicy(self._map.names, *self._marks, _PATIENCE)
        self._scaled = MixedPrecision("16-mixed", device_type) if self._dtype is torch.float16 else None
        self._foreign_scaler = {}
        self._controller_state = None
        self.switches = []
        self._has_advised = False

    def _warn_of_units(self, units: Blocks) -> None:
        assert self._map is not None
        for name, reason in units.refused.items():
            rank_zero_warn(f"MemoryAwarePrecision leaves {name} in float32: {reason}")
        unmatched = [pattern for pattern in self._map.unmatched if pattern not in KEEP_FLOAT32]
        if unmatched:
            rank_zero_warn(f"keep_float32={unmatched} fits no module in those that may be switched")
        if not (self._map.names or units.refused):
            rank_zero_warn(
                "MemoryAwarePrecision found no modules to switch; name some, as in"
                ' MemoryAwarePrecision(modules=["MyBlock"])'
            )

    def _stop(self) -> None:
        if self._controller is not None:
            self._controller_state = self._controller.state_dict(wait_s=0.0)
        if self._map is not None:
            self._map.remove()
        if isinstance(self._exchange, BackgroundGather):
            self._exchange.close()
        self._map = self._controller = self._exchange = None
        self._is_in_step = self._is_scaling = False
        self._unconfirmed = []

    def _begin_step(self) -> SwitchController:
        """Switches if it is time to, unless an optimizer step has begun and not ended yet."""
        if self._controller is None:
            self._controller = self._make_controller()
            self._is_scaling = self._scaled is not None and bool(self.low_modules)
        if not self._is_in_step:
            self._is_in_step = True
            for switch in self._controller.begin_step():
                self._tell(switch)
            assert self._module is not None
            # With several optimizers, gradients may wait for one that has not stepped.
            self._follow_with_scaling(keeps_gradients=not self._module.automatic_optimization)
            self._tell_measured()
        return self._controller

    def _make_controller(self) -> SwitchController:
        assert self._module is not None
        assert self._map is not None
        assert self._policy is not None
        strategy = self._module.trainer.strategy
        probe = self._own_probe or default_probe(strategy.root_device)
        if self._budget_bytes is not None:
            probe = BudgetProbe(probe, self._budget_bytes)
        self._exchange = BackgroundGather() if self._module.trainer.world_size > 1 else _Alone()
        controller = SwitchController(self._map, self._policy, probe, self._exchange, self._interval)
        if self._controller_state is not None:
            controller.load_state_dict(self._controller_state)
        return controller

    def _follow_with_scaling(self, *, keeps_gradients: bool) -> None:
        is_scaling = self._scaled is not None and bool(self.low_modules)
        if is_scaling == self._is_scaling:
            return
        self._is_scaling = is_scaling
        if not keeps_gradients:
            return
        assert self._module is not None
        assert self.scaler is not None
        factor = self.scaler.get_scale() if is_scaling else 1 / self.scaler.get_scale()
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _tell(self, switch: Switch) -> None:
        assert self._module is not None
        assert self._map is not None
        switch = replace(switch, step=self._module.trainer.global_step)
        self.switches.append(switch)
        self._unconfirmed += [switch] if switch.to_low else []
        if switch.to_low and self._module.device.type == "cpu":
            give_back(self._module.device)  # or the process would stay as large as it was
        rank_zero_info(f"MemoryAwarePrecision: {describe(switch, self._dtype, len(self._map.names))}")
        for listener in self._listeners:
            listener(switch)

    def _tell_measured(self) -> None:
        assert self._policy is not None
        known = self._policy.bytes
        for switch in list(self._unconfirmed):
            if all(name in known and known[name].is_measured for name in switch.units):
                self._unconfirmed.remove(switch)
                rank_zero_info(f"MemoryAwarePrecision: {describe_measured(switch, known)}")
        if self._policy.is_exhausted and not self._has_advised:
            self._has_advised = True
            rank_zero_warn(f"MemoryAwarePrecision: {advice(self._marks[0])}")


class _Alone:
    """The exchange of one rank with itself."""

    failure: str | None = None

    def __init__(self) -> None:
        self._values: NDArray[np.float64] | None = None

    def start(self, values: NDArray[np.float64]) -> None:
        self._values = values

    def take(self, wait_s: float = 0.0) -> NDArray[np.float64] | None:
        return None if self._values is None else self._values[np.newaxis]


def _find(module: pl.LightningModule, wanted: list[str] | None) -> Blocks:
    if is_compiled(module):
        return Blocks(refused={"the model": 'it is compiled; use precision="bf16-mixed" if it does not fit'})
    return find_units(module, wanted)


def _require_settings(dtype: object, high: float, low: float, budget: int | None, interval: int) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} is none of {', '.join(map(repr, _DTYPES))}")
    if not 0 < low < high:
        raise ValueError(f"low_watermark={low} and high_watermark={high} must be positive, the low one below the high")
    if budget is not None and budget <= 0:
        raise ValueError(f"budget_bytes={budget} leaves no memory at all; give 1 or more, or None for the device's")
    if interval < 1:
        raise ValueError(f"check_every_n_steps={interval} is no number of steps; give 1 or more")


def _require_lists(**names: object) -> None:
    for argument, value in names.items():
        if isinstance(value, str):  # each letter would be a name, and a star fits everything
            raise ValueError(f"{argument}={value!r} is one string; give a list, as in {argument}=[{value!r}]")
