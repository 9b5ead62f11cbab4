"""What a rule hands to the diagnosis: the time lost in each step, before anyone has asked how sure it is."""

from dataclasses import dataclass

from lightning_hpc.trace.step_table import StepTable, Times


@dataclass(frozen=True)
class Candidate:
    """A possible finding.

    Attributes:
        dimension: One of `finding.DIMENSIONS`.
        lost: Milliseconds of each step, of shape (steps,).
        evidence: A sentence with the figures.
        first_try: What to try first.
        threshold: The share from which it is a finding.
        most_confidence: Less than 1 where the records cannot tell it from something else.
    """

    dimension: str
    lost: Times
    evidence: str
    first_try: str
    threshold: float
    most_confidence: float = 1.0


def whole(table: StepTable) -> Times:
    """Milliseconds of each step with the spans before it, of shape (steps,)."""
    return table.shared("total")


def share_of(lost: Times, table: StepTable) -> float:
    """Part of the training time, 0 to 1."""
    return float(lost.sum() / whole(table).sum())
