import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import FSDPStrategy

from examples.language_model import LanguageModel, StandardLibrary
from lightning_hpc.callbacks import ActivationCheckpointing, StepTrace
from lightning_hpc.memory import SavedActivations
from lightning_hpc.precision import MemoryAwarePrecision, Switch
from lightning_hpc.trace import read_traces
from tests.callbacks.test_step_trace import make_trainer
from tests.memory.block_models import equal
from tests.precision.plugin_models import CALM, HIGH, LOW, Manual, Module, everything, fit, loader, make_plugin

PRESSURE = [CALM, HIGH, CALM, CALM, HIGH, CALM]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("make", "kwargs"),
    [
        (Module, {}),
        (Module, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
        (Manual, {}),
        (lambda: Module("lbfgs"), {"max_steps": 6}),
    ],
)
def test_without_pressure_all_is_bitwise_that_of_float32(make: Any, kwargs: Any, dtype: Any) -> None:
    if dtype == "fp16" and kwargs.get("max_steps") == 6:
        pytest.skip("LBFGS is refused")
    kwargs = {"max_steps": 50, **kwargs}
    plain = everything(fit(make(), precision="32-true", **kwargs))
    plugin = make_plugin([CALM], dtype)
    assert equal(plain, everything(fit(make(), plugin=plugin, **kwargs)))
    assert plugin.switches == []
    assert plugin.measured["blocks.0"].plain > 0


def steps_of(maps: list[tuple[str, list[str]]], places: int) -> list[list[list[str]]]:
    return [[low for _, low in maps[start : start + places]] for start in range(0, len(maps), places)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_map_changes_only_where_an_optimizer_step_begins(dtype: Any) -> None:
    module = Module()
    plugin = make_plugin(PRESSURE, dtype)
    fit(module, plugin=plugin, accumulate_grad_batches=3)
    windows = steps_of(module.maps, 6)  # three forwards and backwards
    assert len(windows) == 12
    assert all(low == window[0] for window in windows for low in window)
    assert windows[0][0] == []
    assert len(windows[-1][0]) > len(windows[4][0]) > 0
    assert [switch.step for switch in plugin.switches] == [3, 6]

    manual = Manual()
    fit(manual, plugin=make_plugin(PRESSURE, dtype), max_steps=20)
    assert all(forward == backward for forward, backward in steps_of(manual.maps, 2))
    assert len(manual.maps[-1][1]) > 0


def test_lbfgs_with_fp16_is_refused_at_the_start_and_not_under_pressure() -> None:
    with pytest.raises(ValueError, match="does not go with LBFGS"):
        fit(Module("lbfgs"), plugin=make_plugin([CALM], "fp16"))


def test_lbfgs_evaluates_a_step_in_one_precision() -> None:
    module = Module("lbfgs")
    fit(module, plugin=make_plugin([HIGH, CALM]), max_steps=5)
    counts = [len(low) for place, low in module.maps if place == "forward"]
    changes = [index for index in range(1, len(counts)) if counts[index] != counts[index - 1]]
    assert len(changes) == 1
    assert changes[0] % 4 == 0 or changes[0] % 3 == 0  # a whole number of steps of three or four evaluations


class Stop(pl.Callback):
    """Saves at a step, and goes on."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


class Reseed(pl.Callback):
    """Randomness that depends on the batch, so that a resumed run draws the same."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        pl.seed_everything(trainer.global_step, verbose=False)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("step", [1, 4, 6, 9])
def test_resuming_at_any_level_is_bitwise(tmp_path: Path, step: int, dtype: Any) -> None:
    script = [CALM, HIGH, CALM, CALM, HIGH, *[CALM] * 30]
    plugin = make_plugin(script, dtype)
    trainer = fit(Module(), Reseed(), Stop(tmp_path / "stop.ckpt", step), plugin=plugin)
    assert {len(plugin.switches)} == {2}
    checkpoint = torch.load(tmp_path / "stop.ckpt", weights_only=True)
    low = checkpoint["MemoryAwarePrecision"]["lowered"]
    assert len(low) == {1: 0, 4: 1, 6: 1, 9: 2}[step], low
    # The rest of the script: no pressure, or what comes after the stop.
    rest = make_plugin([HIGH, *[CALM] * 30] if step == 6 else [CALM] if step == 9 else script[step:], dtype)
    if step in (1, 4):
        rest = make_plugin(script[step - 1 :], dtype)
    other = fit(Module(), Reseed(), plugin=rest, ckpt=tmp_path / "stop.ckpt")
    if step == 9:
        assert equal(everything(trainer)["module"], everything(other)["module"])
        assert equal(everything(trainer)["optimizers"], everything(other)["optimizers"])
        if dtype == "fp16":
            assert plugin.scaler is not None
            assert rest.scaler is not None
            assert plugin.scaler.state_dict() == rest.scaler.state_dict()
    assert plugin.low_modules[: len(low)] == rest.low_modules[: len(low)] == low


def save(path: Path, trainer: pl.Trainer) -> Any:
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=True)


def test_a_checkpoint_moves_to_and_from_lightnings_own_plugins_with_its_scaler(tmp_path: Path) -> None:
    scaler = {"init_scale": 2.0**9, "growth_interval": 3}
    lightnings = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **scaler))  # type: ignore[arg-type]
    first = save(tmp_path / "first", fit(Module(), plugin=lightnings, max_steps=4))
    ours = make_plugin([CALM, HIGH, CALM], "fp16")
    second = save(tmp_path / "second", fit(Module(), plugin=ours, ckpt=tmp_path / "first", max_steps=12))
    assert first["MixedPrecision"]["scale"] == 2.0**10
    assert second["MixedPrecision"]["scale"] == 2.0**12  # it has grown with every third step in fp16
    again = pl.plugins.MixedPrecision("16-mixed", "cpu")
    third = save(tmp_path / "third", fit(Module(), plugin=again, ckpt=tmp_path / "second", max_steps=12))
    assert third["MixedPrecision"] == second["MixedPrecision"]
    # bf16 has no use for a scaler, and hands it on.
    bf16 = save(tmp_path / "bf16", fit(Module(), plugin=make_plugin([CALM]), ckpt=tmp_path / "second", max_steps=13))
    assert bf16["MixedPrecision"] == second["MixedPrecision"]
    for precision in ("32-true", "bf16-mixed"):
        trainer = fit(Module(), precision=precision, ckpt=tmp_path / "second", max_steps=14)
        assert trainer.global_step == 14
        plain = save(tmp_path / precision, trainer)
        fit(Module(), plugin=make_plugin([CALM]), ckpt=tmp_path / precision, max_steps=15)
        assert "MixedPrecision" not in plain


@pytest.mark.filterwarnings("ignore:MemoryAwarePrecision. all modules")
def test_a_checkpoint_of_another_model_starts_in_float32_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "one"
    checkpoint = save(path, fit(Module(), plugin=make_plugin([HIGH])))
    checkpoint["MemoryAwarePrecision"]["lowered"] = ["encoder"]
    torch.save(checkpoint, path)
    plugin = make_plugin([CALM])
    with pytest.warns(UserWarning, match="starts anew in float32, since the checkpoint is of another model: encoder"):
        fit(Module(), plugin=plugin, ckpt=path, max_steps=14)
    assert plugin.low_modules == []


class Peaks(pl.Callback):
    """What each step saves."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.recorder = SavedActivations([*module.parameters(), *module.buffers(), batch]).__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.recorder.__exit__(None, None, None)
        self.bytes.append(self.recorder.peak_bytes)


def language_model_peak(**kwargs: Any) -> int:
    pl.seed_everything(0, verbose=False)
    peaks = Peaks()
    trainer = make_trainer(peaks, max_steps=5, limit_val_batches=0, **kwargs)
    trainer.fit(LanguageModel(depth=2), StandardLibrary())
    return peaks.bytes[-1]


def test_under_pressure_a_language_model_saves_a_third_less_and_less_than_plain_mixed_precision() -> None:
    full = language_model_peak()
    low = language_model_peak(plugins=[make_plugin([HIGH])])
    assert low < 0.7 * full
    assert low < 0.85 * language_model_peak(precision="bf16-mixed")


class OverflowOnce(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * float("inf") if batch_idx == 6 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Weights(pl.Callback):
    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.scales: list[float] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.norms.append(float(module.first.weight.grad.norm()))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.weights.append(module.first.weight.detach().clone())
        self.scales.append(trainer.scaler.get_scale())


def test_fp16_scales_only_while_something_is_low_and_skips_a_step_that_overflows() -> None:
    weights = Weights()
    plugin = make_plugin([CALM, HIGH, CALM], "fp16")
    fit(OverflowOnce(), weights, plugin=plugin, gradient_clip_val=1e-3)
    assert weights.scales[:6] == [2.0**16] * 6
    assert weights.scales[6:] == [2.0**15] * 6
    assert torch.equal(weights.weights[5], weights.weights[6])
    assert not torch.equal(weights.weights[6], weights.weights[7])
    before, after = weights.norms[2], weights.norms[5]
    assert 0.1 < before / after < 10  # gradients are unscaled before they are clipped
    changes = [float((one - other).norm()) for one, other in zip(weights.weights, weights.weights[1:], strict=False)]
    assert all(change <= 1.01e-5 for change in changes)


class ManualSgd(Manual):
    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.01)
            for optimizer in super().configure_optimizers()
        ]


def test_gradients_left_over_at_a_switch_to_fp16_keep_their_size() -> None:
    results = []
    for dtype in ("bf16", "fp16"):
        trainer = fit(ManualSgd(), plugin=make_plugin([CALM, HIGH, CALM], dtype), max_steps=16)  # type: ignore[arg-type]
        results.append(torch.cat([each.detach().flatten() for each in trainer.lightning_module.parameters()]))
    assert torch.allclose(*results, atol=2e-3)


def test_a_switch_asks_for_a_new_checkpointing_plan_and_gradients_are_those_without() -> None:
    losses = []
    for callbacks in ([], [checkpointing := ActivationCheckpointing(budget=0.5)]):
        module, plugin = Module(), make_plugin([CALM] * 6 + [HIGH, CALM])
        plans: list[Any] = []
        plugin.listen(lambda switch, plans=plans: plans.append(switch))  # type: ignore[misc]
        trainer = fit(module, *callbacks, plugin=plugin, max_steps=14)
        losses.append(everything(trainer))
        assert [switch.step for switch in plans] == [8]
    assert equal(*losses)
    assert checkpointing.plan is not None


def test_forwards_are_given_back_and_a_module_can_be_copied_and_pickled_meanwhile() -> None:
    class Copy(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            twin = copy.deepcopy(module.blocks)
            plain = pickle.loads(pickle.dumps(module.blocks))
            for each in (module, twin, plain):
                each.eval()
            x = torch.ones(2, 8)
            low = module.blocks(x)
            assert torch.equal(twin(x), low)
            assert torch.equal(plain(x), low) == (trainer.precision_plugin.low_modules == [])
            module.train()

    module = Module()
    plugin = make_plugin([HIGH])
    for _ in range(2):
        trainer = fit(module, Copy(), plugin=plugin, limit_val_batches=1, max_steps=5)
        assert plugin.low_modules != []
        assert all("forward" not in vars(each) for each in module.modules())
    module.maps.clear()
    trainer.validate(module, loader(2), verbose=False)
    assert module.maps == []  # in float32


def test_an_exception_gives_forwards_back_too() -> None:
    class Broken(Module):
        def on_before_backward(self, loss: Any) -> None:
            if self.trainer.global_step == 4:
                raise RuntimeError("broken")

    module = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        fit(module, plugin=make_plugin([HIGH]))
    assert all("forward" not in vars(each) for each in module.modules())


def test_switches_are_logged_and_in_the_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lightning.pytorch"):
        plugin = make_plugin([CALM, HIGH, CALM, *[LOW] * 40])
        fit(Module(), StepTrace(tmp_path, console=False), plugin=plugin, max_steps=30)
    text = caplog.text
    assert "step 3, memory at 95% of 3.9 KiB: blocks." in text
    assert "go to bf16, which saves about" in text
    assert "measured after step 3: blocks." in text
    assert "come back to float32, which takes about" in text
    (trace,) = read_traces(tmp_path)
    events = [event["details"] for event in trace.events if event["name"] == "precision_switch"]
    assert [event["reason"] for event in events] == [switch.reason for switch in plugin.switches]
    assert events[0]["units"] == list(plugin.switches[0].units)


def test_nothing_left_to_lower_is_told_once() -> None:
    with pytest.warns(UserWarning, match="memory is still above 90% of the limit") as caught:
        fit(Module(), plugin=make_plugin([HIGH]))
    assert sum("still above" in str(each.message) for each in caught) == 1


class Quiet(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean()


@pytest.mark.filterwarnings("ignore:MemoryAwarePrecision. all modules")
def test_what_cannot_be_switched_is_told() -> None:
    class Empty(Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.norm = self.blocks = torch.nn.Identity()  # type: ignore[assignment]
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: Any) -> Any:
            return x * self.weight

    with pytest.warns(UserWarning, match="found no modules to switch; name some"):
        fit(Empty(), plugin=make_plugin([HIGH]))
    with pytest.warns(UserWarning, match=r"keep_float32=\['router'\] fits no module"):
        fit(Module(), plugin=make_plugin([CALM], keep_float32=["router"]), max_steps=1)
    compiled = torch.compile(Quiet(), backend="eager")
    with pytest.warns(UserWarning, match="leaves the model in float32: it is compiled"):
        fit(compiled, plugin=make_plugin([HIGH]), max_steps=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'Missing' is neither the name of a module"):
        fit(Module(), plugin=make_plugin([CALM], modules=["Missing"]))


@pytest.mark.filterwarnings("ignore:MemoryAwarePrecision. all modules")
def test_only_named_modules_are_switched() -> None:
    plugin = make_plugin([HIGH], modules=["blocks.1", "first"])
    fit(Module(), plugin=plugin)
    assert set(plugin.low_modules) <= {"blocks.1", "first"}
    assert "blocks.1" in plugin.low_modules


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"dtype": "int8"}, "dtype='int8' is none of 'bf16', 'fp16'"),
        ({"high_watermark": 0.5}, r"low_watermark=0\.7 and high_watermark=0\.5"),
        ({"low_watermark": 0}, "low_watermark=0 and"),
        ({"check_every_n_steps": 0}, "check_every_n_steps=0 is no number of steps"),
        ({"budget_bytes": 0}, "budget_bytes=0"),
        ({"keep_float32": "*head*"}, r"keep_float32='\*head\*' is one string; give a list"),
        ({"modules": "blocks"}, "modules='blocks' is one string; give a list"),
    ],
)
def test_wrong_arguments_are_named(kwargs: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MemoryAwarePrecision(**kwargs)


def test_strategies_that_shard_are_refused() -> None:
    class Unknown(pl.strategies.Strategy):  # type: ignore[misc]
        pass

    plugin = make_plugin([CALM])
    module = Module()
    trainer = make_trainer(plugins=[plugin])
    trainer.strategy.__class__ = Unknown
    plugin.convert_module(module)
    module._trainer = trainer
    with pytest.raises(ValueError, match="works with one device, ddp and hpc, not with Unknown"):
        plugin._start(module)
    with pytest.raises(TypeError, match="FSDP"):
        FSDPStrategy(precision_plugin=plugin)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:MemoryAwarePrecision. all modules")
def test_a_budget_of_bytes_drives_it() -> None:
    plugin = MemoryAwarePrecision(budget_bytes=10**6, check_every_n_steps=1)
    fit(Module(), plugin=plugin, max_steps=5)
    assert plugin.low_modules != []  # the process has more than a megabyte


def test_lightning_cli_makes_it_from_yaml_and_explains_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("""
trainer:
  accelerator: cpu
  fast_dev_run: true
  plugins:
    - class_path: lightning_hpc.precision.MemoryAwarePrecision
      init_args:
        dtype: fp16
        budget_bytes: 1000000000
        keep_float32: ["*LayerNorm*", "head"]
        modules: ["blocks.0"]
        probe:
          class_path: lightning_hpc.memory.BudgetProbe
          init_args:
            inner:
              class_path: lightning_hpc.memory.HostProbe
            budget_bytes: 1000
model:
  class_path: tests.precision.plugin_models.Module
""")
    cli = LightningCLI(run=False, args=["--config", str(config)], save_config_callback=None, subclass_mode_model=True)
    plugin = cli.trainer.precision_plugin
    assert isinstance(plugin, MemoryAwarePrecision)
    assert plugin._dtype is torch.float16
    assert plugin._own_probe is not None
    assert plugin._own_probe.read().limit_bytes == 1000
    with pytest.raises(SystemExit):
        LightningCLI(run=False, args=["--trainer.plugins.help", "lightning_hpc.precision.MemoryAwarePrecision"])
    text = capsys.readouterr().out
    for name in ("dtype", "high_watermark", "low_watermark", "budget_bytes", "probe", "modules", "keep_float32"):
        assert name in text
    assert "Optimizer steps between two readings" in text


@pytest.mark.filterwarnings("ignore:MemoryAwarePrecision. all modules")
def test_the_best_checkpoint_is_written_while_modules_are_low(tmp_path: Path) -> None:
    plugin = make_plugin([HIGH])
    trainer = fit(Module(), ModelCheckpoint(tmp_path, every_n_train_steps=3), plugin=plugin, enable_checkpointing=True)
    checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    assert checkpoint["MemoryAwarePrecision"]["lowered"] == plugin.low_modules
    assert all(value.dtype != torch.bfloat16 for value in checkpoint["state_dict"].values())
    assert isinstance(plugin.switches[0], Switch)
