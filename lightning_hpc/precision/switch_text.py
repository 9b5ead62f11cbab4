"""What a user reads about switches of precision."""

from collections.abc import Mapping

import torch

from lightning_hpc.precision.switch import Switch
from lightning_hpc.precision.unit_bytes import UnitBytes

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def describe(switch: Switch, dtype: torch.dtype, unit_count: int) -> str:
    """One line about a switch.

    Args:
        switch: The switch.
        dtype: The low precision.
        unit_count: Number of all units.
    """
    if switch.to_low:
        change = f"go to {_NAMES[dtype]}"
        change += f", which saves about {_bytes(switch.bytes)} of activations" if switch.bytes else ""
    elif switch.reason == "useless":
        change = "come back to float32 for good, since that saved nothing"
    else:
        change = f"come back to float32, which takes about {_bytes(switch.bytes)} of activations"
    return (
        f"step {switch.step}, {_cause(switch)}: {', '.join(switch.units)} {change}"
        f" ({switch.low_count} of {unit_count} modules are low)"
    )


def describe_measured(switch: Switch, known: Mapping[str, UnitBytes]) -> str:
    """One line about what a switch to low precision has saved."""
    plain = sum(known[name].plain for name in switch.units)
    low = sum(known[name].low for name in switch.units)
    return (
        f"measured after step {switch.step}: {', '.join(switch.units)} save {_bytes(low)} of activations instead of"
        f" {_bytes(plain)}"
    )


def advice(high_watermark: float) -> str:
    """What to try when there is nothing left to switch."""
    return (
        f"all modules that gain by it are in low precision, and memory is still above {high_watermark:.0%} of the"
        " limit. In this order, try: a smaller batch with accumulate_grad_batches; ActivationCheckpointing; a strategy"
        ' that shards the model, such as "fsdp"'
    )


def _cause(switch: Switch) -> str:
    if switch.pressure is None or switch.limit_bytes is None:
        return "measured" if switch.reason == "useless" else switch.reason
    return f"memory at {switch.pressure:.0%} of {_bytes(switch.limit_bytes)}"


def _bytes(count: int) -> str:
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
