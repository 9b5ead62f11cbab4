"""Speed, size and error of the gradient codecs on this machine.

python benchmarks/micro/codecs.py
python benchmarks/micro/codecs.py --numel 65536 --codecs int8 int4
python benchmarks/micro/codecs.py --device cuda

GB/s are bytes of fp32 gradient by time. The size is relative to fp32. The first error is that of one encoding; the
second is what error feedback still holds back after some steps, relative to the sum of the gradients of these steps.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_hpc.comm.codecs import BlockCodec, Codec, LinearCodec, Segment, make_codec

NAMES = ("bf16", "fp16", "int8", "int4", "int3", "bitmask", "topk", "lowrank")
COLUMNS = 256


def gradients(numel: int, steps: int, device: str) -> list[Tensor]:
    """A common part of low rank, as gradients of consecutive steps have one, and noise of the same size."""
    generator = torch.Generator().manual_seed(0)
    rows = numel // COLUMNS
    left, right = torch.randn(rows, 16, generator=generator), torch.randn(16, COLUMNS, generator=generator)
    common = (left @ right).flatten() / 4  # the sum of 16 products has a deviation of 4
    return [(common + torch.randn(common.numel(), generator=generator)).to(device) for _ in range(steps)]


def functions(
    codec: Codec, numel: int, segments: Sequence[Segment]
) -> tuple[Callable[[Tensor], Tensor | None], Callable[[Tensor], Tensor]]:
    """The codec's encode and decode for flat values."""
    if isinstance(codec, BlockCodec):
        return (lambda values: codec.encode(values.view(-1, codec.block))), (
            lambda packed: codec.decode(packed).flatten()
        )
    if isinstance(codec, LinearCodec):
        return partial(codec.encode, segments=segments), partial(codec.decode, segments=segments)
    return codec.encode, partial(codec.decode, numel=numel)


def median_seconds(function: Callable[[], object], rounds: int, device: str) -> float:
    """Median duration of a call, after a few calls to warm up."""
    seconds = []
    for index in range(rounds + 3):
        start = time.perf_counter()
        function()
        if device != "cpu":
            torch.cuda.synchronize()
        if index >= 3:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(name: str, steps: Sequence[Tensor], rounds: int, device: str) -> str:
    """One line of the table."""
    numel = steps[0].numel()
    segments = [Segment("weight", 0, numel // COLUMNS, COLUMNS)]
    codec = make_codec(name)
    encode, decode = functions(codec, numel, segments)
    residual, errors, ratios = torch.zeros_like(steps[0]), [], []
    for values in steps:
        corrected = values + residual
        packed = encode(corrected)
        if packed is None:
            return f"{name:8s} these values are too dense for it"
        residual = corrected - decode(packed)
        if isinstance(codec, LinearCodec):
            codec.advance(packed, segments)
        errors.append((residual.norm() / corrected.norm()).item())
        ratios.append(packed.numel() * packed.element_size() / (4 * numel))
    held_back = (residual.norm() / torch.stack(list(steps)).sum(0).norm()).item()
    packed = encode(steps[0])
    assert packed is not None
    encoding = median_seconds(partial(encode, steps[0]), rounds, device)
    decoding = median_seconds(partial(decode, packed), rounds, device)
    speeds = (4e-9 * numel / seconds for seconds in (encoding, decoding))
    figures = f"{1e3 * encoding:9.3f} {1e3 * decoding:9.3f} " + " ".join(f"{speed:9.2f}" for speed in speeds)
    return f"{name:8s} {figures} {statistics.mean(ratios):8.4f} {errors[0]:9.5f} {held_back:9.5f}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", nargs="+", default=NAMES, help="which ones (default: all)")
    parser.add_argument("--numel", type=int, default=1_650_688, help="numbers, rounded down (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps of error feedback (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="calls to take the median of (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)

    steps = gradients(arguments.numel, arguments.steps, arguments.device)
    print(f"{steps[0].numel():,} numbers, {arguments.device}, {arguments.threads} thread(s), {arguments.steps} steps")
    print("codec    encode ms decode ms   GB/s in  GB/s out     size   error  held back")
    for name in arguments.codecs:
        print(measure(name, steps, arguments.rounds, arguments.device), flush=True)


if __name__ == "__main__":
    main()
