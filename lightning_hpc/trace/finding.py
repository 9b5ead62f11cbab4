"""What a diagnosis says."""

from dataclasses import dataclass

DIMENSIONS = ("data", "compute", "memory", "communication", "framework")
"""What may be the bottleneck."""


@dataclass(frozen=True)
class Finding:
    """One bottleneck.

    Attributes:
        dimension: One of `DIMENSIONS`.
        share: Part of the training time that it takes, 0 to 1; 0 where it is a risk that has cost no time yet.
        evidence: A sentence with the figures.
        confidence: Part of the resampled runs in which the finding holds, 0 to 1: what doubt the run's own variation
            leaves. At most 0.5 where the records cannot tell it from something else, as the evidence then says.
        first_try: What to try first.
        rank: The rank that is slow alone. None if it is all of them.
    """

    dimension: str
    share: float
    evidence: str
    confidence: float
    first_try: str
    rank: int | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What slows a run down.

    Attributes:
        headline: ``healthy``, ``not enough samples (12 of 20 steps)``, or the first finding in a sentence.
        findings: Bottlenecks, the largest share first. Empty where there is none, or where nobody can tell.
        notes: What the records leave open, a sentence each.
        steps: Iterations that all ranks have recorded.
        ranks: Ranks that left a file.
        is_healthy: Whether there were samples enough, and no finding.
    """

    headline: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    steps: int
    ranks: int
    is_healthy: bool


def render(diagnosis: Diagnosis) -> str:
    """The diagnosis as plain text, without a newline at its end."""
    counted = f"{diagnosis.steps} steps of {diagnosis.ranks} rank{'s' * (diagnosis.ranks != 1)}"
    lines = [f"Diagnosis of {counted}: {diagnosis.headline}"]
    for number, finding in enumerate(diagnosis.findings, start=1):
        where = finding.dimension if finding.rank is None else f"{finding.dimension} of rank {finding.rank}"
        lines += [
            f"{number}. {where}: {finding.share:.0%} of the time, confidence {finding.confidence:.2f}",
            f"   {finding.evidence}",
            f"   Try first: {finding.first_try}",
        ]
    return "\n".join([*lines, *(f"Note: {note}" for note in diagnosis.notes)])
