"""Windows of iterations that ranks have sent each other, as a `StepTable`."""

import numpy as np
from numpy.typing import NDArray

from lightning_hpc.trace.records import PHASES
from lightning_hpc.trace.step_table import StepTable, Times

WINDOW_COLUMNS = (*PHASES, "total", "epoch", "batch")
"""What a row holds: milliseconds by phase (communication is NaN where it is unknown) and in total, then which
iteration it is."""

_TOTAL, _EPOCH, _BATCH = (WINDOW_COLUMNS.index(name) for name in ("total", "epoch", "batch"))


def table_of_windows(windows: NDArray[np.float64]) -> StepTable:
    """Aligns the windows of all ranks by epoch and batch.

    Spans are not in windows, so ``loader_start`` and ``between_epochs`` are zero; nor are optimizer steps, so every
    iteration passes for an update.

    Args:
        windows: Shape (ranks, iterations, `WINDOW_COLUMNS`). A row whose total is not above 0 is none.
    """
    rows = [_by_iteration(window) for window in windows]
    common = sorted(set.intersection(*(set(of_rank) for of_rank in rows)))
    chosen = [[of_rank[key] for key in common] for of_rank in rows]
    aligned = np.stack([window[indices] for window, indices in zip(windows, chosen, strict=True)])
    times: dict[str, Times] = {name: aligned[:, :, column] for column, name in enumerate(WINDOW_COLUMNS[: _TOTAL + 1])}
    times["loader_start"] = times["between_epochs"] = np.zeros_like(times["total"])
    updates = np.ones(len(common), dtype=np.bool_)
    return StepTable(tuple(range(len(windows))), len(common), times, updates, records=((),) * len(windows))


def _by_iteration(window: NDArray[np.float64]) -> dict[tuple[float, float], int]:
    return {(row[_EPOCH], row[_BATCH]): index for index, row in enumerate(window.tolist()) if row[_TOTAL] > 0}
