"""What Lightning calls for each Trainer, installed as an entry point of ``lightning.pytorch.callbacks_factory``.

It is no part of the package, because a module of it imports the package: each program that makes a Trainer would pay
for that, and fail with it, though it has asked for nothing.
"""

import os
from typing import Any

VARIABLES = ("LIGHTNING_HPC_TRACE", "LIGHTNING_HPC_REPORT")


def make_callbacks() -> list[Any]:
    """The callbacks that the environment asks for; see `lightning_hpc.callbacks.from_environment`."""
    if all(os.environ.get(name, "") in ("", "0") for name in VARIABLES):
        return []
    from lightning_hpc.callbacks.from_environment import callbacks_from_environment

    return callbacks_from_environment(os.environ)
