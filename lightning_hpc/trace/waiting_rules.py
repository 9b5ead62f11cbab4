"""Rules for what a training waits for: data, the network, Lightning and its callbacks."""

import numpy as np

from lightning_hpc.trace.candidate import Candidate, whole
from lightning_hpc.trace.step_table import WRITING, StepTable, Times

# A job that computes has some per cent of each; what is worth a user's time begins at a tenth.
_LEAST_SHARE = 0.10
# Backward computes two products where forward computes one, and a third forward under activation checkpointing; what is
# beyond that, and another forward of margin, is likely the gradients' way through the network.
_ORDINARY_BACKWARD = 3.0
_SUSPICIOUS_BACKWARD = 4.0
_INFERRED = 0.5


def data_rule(table: StepTable, *, is_asynchronous: bool) -> Candidate:
    """Waiting for batches, starting a loader, and moving batches to the device.

    Args:
        table: The iterations.
        is_asynchronous: Whether the host only launches the device's work. The host's wait for a batch may then pass
            while the device computes (lightly-train#749), and its transfer may hold a wait for the device, so that the
            first is an upper bound and the second is left out.
    """
    wait, start, transfer = table.shared("data_prep"), table.shared("loader_start"), table.shared("h2d")
    if is_asynchronous:
        transfer = np.zeros_like(transfer)
    lost = wait + start + transfer
    evidence = (
        f"a step waits {wait.mean():.3g} ms for its batch (median {np.median(wait):.3g} ms, 95th percentile"
        f" {np.percentile(wait, 95):.3g} ms) and {transfer.mean():.3g} ms for the transfer, of"
        f" {whole(table).mean():.3g} ms"
    )
    if start.sum() > lost.sum() / 4:
        evidence += f"; {start.sum() / lost.sum():.0%} of it is spent on starting the loader at each epoch"
    if is_asynchronous:
        evidence += "; the host's clock cannot tell how much of it passes while the device computes, so this is at most"
    return Candidate(
        "data", lost, evidence, _data_advice(wait, start, transfer), _LEAST_SHARE, 0.5 if is_asynchronous else 1
    )


def _data_advice(wait: Times, start: Times, transfer: Times) -> str:
    largest = max(wait.sum(), start.sum(), transfer.sum())
    if start.sum() == largest:
        return "keep the workers between epochs: persistent_workers=True, or SharedMemoryLoader, which does by default"
    if transfer.sum() == largest:
        return "page-locked batches: pin_memory=True, or SharedMemoryDataModule, which copies them ahead"
    return (
        "more workers (num_workers; more than there are processors where samples wait for a disk or a network), or"
        " SharedMemoryDataModule; `lightning-hpc bench data` measures which loader and how many workers it takes"
    )


def framework_rule(table: StepTable) -> Candidate:
    """Lightning's loop, callbacks and loggers, in a step and between epochs."""
    schedule, between = table.unwaited("schedule"), table.unwaited("between_epochs")
    lost = schedule + between + np.maximum(table.shared("unattributed"), 0.0)
    evidence = (
        f"a step spends {schedule.mean():.3g} ms in Lightning's loop, callbacks and loggers (median"
        f" {np.median(schedule):.3g} ms, 95th percentile {np.percentile(schedule, 95):.3g} ms), of"
        f" {whole(table).mean():.3g} ms"
    )
    # Mostly one rank writes, and the others wait.
    checkpoints, logs = (table.times[name].max(axis=0).sum() for name in WRITING)
    for what, written in (("checkpoints", checkpoints), ("logs", logs)):
        if written > lost.sum() / 4:
            evidence += f"; {min(written / lost.sum(), 1):.0%} of it is the writing of {what}"
    if between.sum() > lost.sum() / 10:
        evidence += f"; {between.mean():.3g} ms a step more pass between epochs"
    if between.sum() > lost.sum() / 4:
        advice = "longer epochs, or fewer hooks and checkpoints at their end (ModelCheckpoint(every_n_epochs=…))"
    elif checkpoints > lost.sum() / 2:
        advice = (
            "fewer checkpoints (ModelCheckpoint(every_n_train_steps=…)), a faster disk, or AsyncCheckpointIO, which"
            " does not wait for it"
        )
    elif logs > lost.sum() / 2:
        advice = "a larger log_every_n_steps, or a logger that does not wait for a server"
    elif np.median(schedule) < 1.0:
        advice = "a larger batch, since the loop costs the same for each; a larger log_every_n_steps; fewer callbacks"
    else:
        advice = (
            'fewer or rarer callbacks and a larger log_every_n_steps; `Trainer(profiler="simple")` names the slow hook'
        )
    return Candidate("framework", lost, evidence, advice, _LEAST_SHARE)


def communication_rule(table: StepTable, world_size: int) -> Candidate | None:
    """Exposed communication without waiting for slow ranks; inferred from backward where nobody measured it."""
    if world_size == 1:
        return None
    if not table.knows_comm:
        return _inferred_communication(table)
    lost = table.unwaited("comm")
    step = whole(table).mean()
    evidence = f"gradients are on their way for {lost.mean():.3g} ms after backward, of {step:.3g} ms a step"
    sent = [record["comm_bytes"] for record in table.records[0] if record["comm_bytes"]]
    if sent:
        evidence += f", {np.mean(sent) / 1e6:.3g} MB sent by a rank"
    if len(table.ranks) < world_size:
        evidence += (
            f"; only {len(table.ranks)} of {world_size} ranks left a file, so it may be a wait for one of the others"
        )
    certain = len(table.ranks) == world_size
    return Candidate("communication", lost, evidence, _FASTER_SYNC, _LEAST_SHARE, 1.0 if certain else _INFERRED)


def _inferred_communication(table: StepTable) -> Candidate | None:
    forward, backward = table.unwaited("forward"), table.unwaited("backward")
    local = ~table.updates
    if local.sum() >= 3 and table.updates.sum() >= 3:
        # DDP reduces in the last backward of an accumulation only, so the others show what backward costs without it.
        expected = float(np.median(backward[local]))
        why = f"{expected:.3g} ms where gradients only accumulate"
    else:
        expected = _ORDINARY_BACKWARD * float(np.median(forward))
        if np.median(backward) < _SUSPICIOUS_BACKWARD * np.median(forward):
            return None
        why = f"{np.median(forward):.3g} ms for forward, and {_ORDINARY_BACKWARD:g} times that is ordinary"
    lost = np.where(table.updates, backward - expected, 0.0)
    synchronised = float(np.median(backward[table.updates])) if table.updates.any() else 0.0
    evidence = (
        f"backward takes {synchronised:.3g} ms against {why}; this strategy does not measure communication,"
        ' strategy="hpc" does'
    )
    return Candidate("communication", lost, evidence, _FASTER_SYNC, _LEAST_SHARE, _INFERRED)


_FASTER_SYNC = (
    'strategy="hpc_compressed", or "hpc" where numbers must be exact; `lightning-hpc bench comm` measures both against'
    ' "ddp"'
)
