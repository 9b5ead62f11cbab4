"""Tracing that is switched on from outside: ``LIGHTNING_HPC_TRACE=1 python train.py``, without a change of the script.

==========================  ============================================================================================
``LIGHTNING_HPC_TRACE``     Adds a `StepTrace`. ``1`` (or ``true``, ``yes``, ``on``) means its default directory, any
                            other value is a directory.
``LIGHTNING_HPC_REPORT``    Adds a `PerformanceReport` in the same way, and the `StepTrace` that it reads.
==========================  ============================================================================================

A variable that is empty or ``0`` (or ``false``, ``no``, ``off``) adds nothing. What the Trainer or the model has
already is not added again.
"""

from collections.abc import Mapping
from typing import cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_hpc.callbacks.step_trace import StepTrace

_OFF = ("", "0", "false", "no", "off")
_DEFAULT_DIRECTORY = ("1", "true", "yes", "on")


def callbacks_from_environment(environment: Mapping[str, str]) -> list[Callback]:
    """The callbacks that environment variables ask for, in the order in which they have to be set up.

    Args:
        environment: The variables.
    """
    trace, report = (environment.get(name, "") for name in ("LIGHTNING_HPC_TRACE", "LIGHTNING_HPC_REPORT"))
    callbacks: list[Callback] = []
    if trace.lower() not in _OFF or report.lower() not in _OFF:
        callbacks.append(_UnlessPresent(StepTrace, _dirpath(trace)))
    if report.lower() not in _OFF:
        from lightning_hpc.callbacks.performance_report import PerformanceReport

        callbacks.append(_UnlessPresent(PerformanceReport, _dirpath(report)))
    return callbacks


def _dirpath(value: str) -> str | None:
    return None if value.lower() in (*_OFF, *_DEFAULT_DIRECTORY) else value


class _UnlessPresent(Callback):
    """Stands for a callback until a fit is set up, since only then it is known whether the Trainer has one already.

    Lightning puts it behind the user's callbacks, and does not say to which Trainer it belongs. It may be in several:
    Lightning also adds it to the list that the user has given.

    Args:
        kind: Class of the callback, which takes a ``dirpath``.
        dirpath: Is given to it.
    """

    def __init__(self, kind: type[Callback], dirpath: str | None) -> None:
        self._kind = kind
        self._dirpath = dirpath

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        callbacks = cast(list[Callback], trainer.callbacks)  # type: ignore[attr-defined]
        others = [callback for callback in callbacks if callback is not self]
        if any(isinstance(callback, self._kind) for callback in others):
            trainer.callbacks = others  # type: ignore[attr-defined]
            return
        made = self._kind(dirpath=self._dirpath)  # type: ignore[call-arg]
        # A new list, since Lightning is going through the other one.
        trainer.callbacks = [made if each is self else each for each in callbacks]  # type: ignore[attr-defined]
        made.setup(trainer, pl_module, stage)
