"""Saves what codecs keep from step to step, one file a rank beside the checkpoint, and restores it.

Lightning's DDP saves rank 0 only (Lightning#17242, #17253), but every rank has residuals of its own. Each rank writes
them itself, since sending them all to rank 0 would take the slow network longer than many steps do.

``<folder>/<name>.ckpt`` has the files ``<folder>/codec_state/<name>.ckpt/rank_00000.ckpt``, …. The checkpoint itself
says which ranks wrote them and at which step; whoever finds other files, or not all of them, goes on without.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn

from lightning_hpc.comm.codecs import Codec
from lightning_hpc.comm.hook import GradientReducer
from lightning_hpc.comm.topology import Topology

_KEY = "lightning_hpc"


def make_stamp(topology: Topology, codecs: Sequence[Codec], step: int) -> dict[str, Any]:
    """What tells whether a codec state belongs to a checkpoint and to a job.

    Strings and numbers only, since a checkpoint may be read by a loader that refuses what is not plain.
    """
    return {"nodes": str(topology), "codecs": ",".join(codec.name for codec in codecs), "step": step}


def save_codec_state(
    state: dict[str, Any], stamp: dict[str, Any], rank: int, checkpoint: dict[str, Any], path: str, io: CheckpointIO
) -> None:
    """Writes this rank's file and notes in the checkpoint what belongs to it; each rank calls it.

    Args:
        state: Of the reducer.
        stamp: From `make_stamp`.
        rank: This one.
        checkpoint: What is about to be saved at ``path``.
        path: Where.
        io: How.
    """
    checkpoint[_KEY] = stamp
    io.save_checkpoint({**stamp, "state": state}, _file(path, rank))


def load_codec_state(
    reducer: GradientReducer,
    stamp: dict[str, Any],
    rank: int,
    checkpoint: Mapping[str, Any],
    path: str,
    strategy: DDPStrategy,
) -> None:
    """Restores this rank's state; all ranks call it, and either all or none of them go on with what was saved.

    Args:
        reducer: Takes the state.
        stamp: From `make_stamp`, for this job.
        rank: This one.
        checkpoint: What was loaded from ``path``.
        path: Where.
        strategy: Lets the ranks agree.
    """
    saved = checkpoint.get(_KEY)
    if saved is None:
        reducer.load_state_dict({})
        return
    path = _resolved(path)
    content = _read(_file(path, rank), strategy.checkpoint_io) if saved == stamp else {}
    mine = {key: content.get(key) for key in stamp} == stamp
    if strategy.reduce_boolean_decision(mine, all=True):
        reducer.load_state_dict(content["state"])
        return
    reducer.load_state_dict({})
    rank_zero_warn(
        f"The codec state of {path!r} is dropped: {_reason(saved, stamp, path)}. What compression had held back from"
        " the last steps' gradients is lost; the weights and the optimizer are restored in full."
    )


def _reason(saved: dict[str, Any], stamp: dict[str, Any], path: str) -> str:
    if saved["nodes"] != stamp["nodes"]:
        return f"it was written for the ranks by node {saved['nodes']}, and now they are {stamp['nodes']}"
    if saved.get("codecs") != stamp["codecs"]:
        return f"it is that of {saved.get('codecs')}, and now compression is {stamp['codecs'] or 'none'}"
    return f"not all ranks found their file of step {saved['step']} in {_folder(path)!r}"


def remove_codec_state(path: str, io: CheckpointIO) -> None:
    """Removes the files that belong to a checkpoint; one rank on each node calls it."""
    with contextlib.suppress(FileNotFoundError):  # another node was faster
        io.remove_checkpoint(_folder(path))


def _read(file: str, io: CheckpointIO) -> dict[str, Any]:
    """A rank's file; empty if it is missing, torn or something else."""
    # There are many kinds of errors for that, and whichever it is, this rank must go on: the others wait to agree.
    with contextlib.suppress(Exception):
        content = io.load_checkpoint(file, weights_only=True)
        if isinstance(content, dict) and isinstance(content.get("state"), dict):
            return content
    return {}


def _resolved(path: str) -> str:
    """What is read if ``path`` is a link, as `last.ckpt` may be. Saving and removing replace the link itself."""
    return path if "://" in path else os.path.realpath(path)


def _folder(path: str) -> str:
    folder, name = os.path.split(path if "://" in path else Path(path).absolute())
    return f"{folder}/codec_state/{name}"


def _file(path: str, rank: int) -> str:
    return f"{_folder(path)}/rank_{rank:05d}.ckpt"
