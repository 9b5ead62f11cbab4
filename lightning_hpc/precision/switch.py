"""`Switch`: one change of the map of precisions."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Switch:
    """Units that have changed their precision together, and why.

    Attributes:
        reason: ``"pressure"``: the high watermark was passed; ``"calm"``: pressure was below the low one for long;
            ``"useless"``: low precision saved nothing; ``"out of memory"``: an allocation has failed.
        units: Their names.
        to_low: Whether they went to low precision, or back to float32.
        pressure: Part of the limit that was in use on the fullest rank; None where nobody has read it.
        limit_bytes: That limit.
        bytes: What this saves, or takes where they go back, as far as it is known.
        low_count: Number of units that are low from now on.
        step: The Trainer's ``global_step``.
    """

    reason: Literal["pressure", "calm", "useless", "out of memory"]
    units: tuple[str, ...]
    to_low: bool
    pressure: float | None
    limit_bytes: int | None
    bytes: int
    low_count: int
    step: int = 0
