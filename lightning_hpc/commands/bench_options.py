"""What the subcommands of ``lightning-hpc bench`` have in common: arguments, classes by name, the environment."""

import os
import platform
from contextlib import nullcontext
from typing import Any

import lightning
import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningModule
from torch import nn

import lightning_hpc
from lightning_hpc.comm.layout import ParameterSpec
from lightning_hpc.commands.output_files import refuse


def add_output(parser: ArgumentParser, json_content: str) -> None:
    """Adds ``--output``."""
    parser.add_argument(
        "--output",
        nargs="+",
        default=[],
        metavar="FILE",
        help=f"files to write: *.json has {json_content}; *.svg is a chart; *.html is the chart with the table",
    )


def add_class(parser: ArgumentParser, name: str, base: type | tuple[type, ...], explanation: str) -> None:
    """Adds ``--NAME CLASS_PATH`` with ``--NAME.ARGUMENT VALUE``, among the other arguments."""
    # A group of its own would be headed by what Lightning's documentation of the class begins with.
    parser.add_subclass_arguments(base, name, as_group=False, metavar="CLASS", help=explanation)


def instantiate(options: Namespace, name: str, base: type | tuple[type, ...]) -> Any:
    """Makes a new object of the class that the option ``name`` holds."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, name)
    # 4.53 calls it so; older versions that we admit have the longer name only.
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes
    return make(Namespace({name: options[name].clone()}))[name]  # type: ignore[no-untyped-call]


def versions() -> dict[str, str]:
    """Of what results depend on."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "lightning_hpc": lightning_hpc.__version__,
    }


def usable_processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_parameters(options: Namespace, command: str) -> list[ParameterSpec]:
    """The trainable parameters of ``--model``, without memory for them where its constructor allows that.

    Raises:
        SystemExit: If the model cannot be made.
    """
    path = options.model.class_path
    try:
        specs = _trainable(_make_model(options, torch.device("meta")))
    except Exception:  # a constructor may look at values, which the meta device has not
        try:
            specs = _trainable(_make_model(options, None))
        except Exception as error:
            refuse(command, f"--model {path} cannot be made: {error!r}. Give the size as --parameters NUMBER instead")
    if not specs:
        refuse(command, f"--model {path} has no trainable parameters, so there are no gradients to send")
    return specs


def _make_model(options: Namespace, device: torch.device | None) -> nn.Module:
    with device or nullcontext():
        model = instantiate(options, "model", LightningModule)
        assert isinstance(model, LightningModule)
        model.configure_model()
    return model


def _trainable(model: nn.Module) -> list[ParameterSpec]:
    return [
        ParameterSpec.of(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
