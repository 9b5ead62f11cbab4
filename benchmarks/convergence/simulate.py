"""Trains the examples' models with each codec, as several nodes would, in one process, and compares the final losses.

python benchmarks/convergence/simulate.py
python benchmarks/convergence/simulate.py --width 64 --context 64 --batch-size 8 --steps 600 --codecs int4 topk:0.1
python benchmarks/convergence/simulate.py --task digits --batch-size 16 --codecs int8 bitmask:1.5 lowrank:4
python benchmarks/convergence/simulate.py --width 64 --context 64 --batch-size 8 --steps 2000 --codecs int4 int4/raw

Each node computes the gradients of its own batch; they are reduced in buckets, with a codec and error feedback, as the
strategy does it over nodes of one rank. A codec's first argument may follow its name, and then `/raw`, which leaves its
preconditioning out. `none` comes first and is what the others are compared to, seed by seed.

The bytes are those that a node sends, relative to an exact all-reduce: 1 for `none`.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.digits import DigitReader, Digits
from examples.language_model import LanguageModel, StandardLibrary
from lightning_hpc.comm.codecs import BlockCodec, Codec, LinearCodec, Segment, SparseCodec, make_codec
from lightning_hpc.comm.exchanges import grain_of
from lightning_hpc.comm.layout import ParameterSpec, Run, codec_slices
from lightning_hpc.comm.preconditioner import Preconditioner

BUCKET_NUMEL = 1 << 20


class Reduction:
    """The sum over nodes of one bucket, with error feedback.

    Args:
        codec: The codec, or None for an exact sum.
        segments: The parameters in the bucket.
        nodes: Number of nodes.
    """

    def __init__(self, codec: Codec | None, segments: list[Segment], nodes: int) -> None:
        self.codec, self.segments = codec, segments
        numel = sum(segment.numel for segment in segments)
        self.exact_bytes = 2 * (nodes - 1) / nodes * 4 * numel
        self.residuals = [torch.zeros(numel) for _ in range(nodes)]
        self.sum_residual = torch.zeros(numel)
        if isinstance(codec, BlockCodec):
            self.run = _whole_run(codec, segments)
            self.preconditioner = Preconditioner(codec.block) if codec.preconditioned else None

    def __call__(self, gradients: list[Tensor]) -> tuple[Tensor, float]:
        """Sums the nodes' gradients; also returns the bytes that a node sends."""
        if self.codec is None:
            return torch.stack(gradients).sum(0), self.exact_bytes
        corrected = [gradient + residual for gradient, residual in zip(gradients, self.residuals, strict=True)]
        if isinstance(self.codec, BlockCodec):
            return self._two_hops(self.codec, corrected)
        if isinstance(self.codec, SparseCodec):
            return self._gather(self.codec, corrected)
        assert isinstance(self.codec, LinearCodec)
        messages = [self.codec.encode(values, self.segments) for values in corrected]
        self._keep(corrected, [self.codec.decode(message, self.segments) for message in messages])
        total = torch.stack(messages).sum(0)
        decoded = self.codec.decode(total, self.segments)
        self.codec.advance(total, self.segments)
        return decoded, self.exact_bytes * total.numel() / decoded.numel()

    def _two_hops(self, codec: BlockCodec, corrected: list[Tensor]) -> tuple[Tensor, float]:
        scale = torch.ones(self.run.numel)
        if self.preconditioner is not None:
            scale = self.preconditioner.scale(self.run, scale.device)
        decoded = [self._round_trip(codec, values, scale) for values in corrected]
        self._keep(corrected, decoded)
        total = torch.stack(decoded).sum(0) + self.sum_residual
        result = self._round_trip(codec, total, scale)
        self.sum_residual = total - result
        if self.preconditioner is not None:
            self.preconditioner.update(self.run, self._padded(result))
        return result, self.exact_bytes * self.run.numel / result.numel() * codec.block_bytes / (4 * codec.block)

    def _gather(self, codec: SparseCodec, corrected: list[Tensor]) -> tuple[Tensor, float]:
        packets = [codec.encode(values) for values in corrected]
        sent = [packet for packet in packets if packet is not None]
        if len(sent) < len(packets):
            self._keep(corrected, corrected)
            return torch.stack(corrected).sum(0), self.exact_bytes
        decoded = [codec.decode(packet, corrected[0].numel()) for packet in sent]
        self._keep(corrected, decoded)
        others = (len(sent) - 1) / len(sent)
        return torch.stack(decoded).sum(0), others * sum(packet.numel() for packet in sent)

    def _keep(self, corrected: list[Tensor], decoded: list[Tensor]) -> None:
        self.residuals = [values - received for values, received in zip(corrected, decoded, strict=True)]

    def _round_trip(self, codec: BlockCodec, values: Tensor, scale: Tensor) -> Tensor:
        scaled = self._padded(values) / scale
        decoded = codec.decode(codec.encode(scaled.view(-1, codec.block))).view(-1) * scale
        return torch.cat([decoded[part.offset : part.offset + part.numel] for part in self.run.parts])

    def _padded(self, values: Tensor) -> Tensor:
        padded = torch.zeros(self.run.numel)
        for part in self.run.parts:
            padded[part.offset : part.offset + part.numel] = values[part.source : part.source + part.numel]
        return padded


def _whole_run(codec: BlockCodec, segments: list[Segment]) -> Run:
    """All parameters of a bucket, each padded to whole blocks."""
    specs = [ParameterSpec(segment.name, segment.numel, segment.rows) for segment in segments]
    (layout,) = codec_slices(specs, 1, 1 << 62, grain_of(codec), {spec.name: 0 for spec in specs})
    return layout.run(0, layout.numel)


class LanguageTask:
    """The example's language model; the loss is that of 256 windows which it is not trained on."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        data = StandardLibrary(context=arguments.context)
        data.setup("fit")
        self.train, self.val = (torch.stack(list(split)).long() for split in (data.train, data.val))
        self.val = self.val[:256]
        self.shape = {"width": arguments.width, "depth": arguments.depth, "context": arguments.context}

    def model(self) -> nn.Module:
        """A new model."""
        return LanguageModel(**self.shape)

    def loss(self, model: nn.Module, indices: Tensor) -> Tensor:
        """The training loss of these windows."""
        return self._loss(model, self.train[indices])

    def final_loss(self, model: nn.Module) -> float:
        """The validation loss."""
        return statistics.mean(self._loss(model, windows).item() for windows in self.val.split(32))

    @staticmethod
    def _loss(model: nn.Module, windows: Tensor) -> Tensor:
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


class DigitsTask:
    """The example's classifier; the loss is that of the validation and test images."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        data = Digits(arguments.batch_size)
        data.setup("fit")
        self.train = [torch.stack(part) for part in zip(*data.train, strict=True)]
        self.val = [torch.stack(part) for part in zip(*data.val, *data.test, strict=True)]

    def model(self) -> nn.Module:
        """A new model."""
        return DigitReader()

    def loss(self, model: nn.Module, indices: Tensor) -> Tensor:
        """The training loss of these images."""
        images, labels = self.train
        return F.cross_entropy(model.network(images[indices]), labels[indices])

    def final_loss(self, model: nn.Module) -> float:
        """The loss of the images that it is not trained on."""
        images, labels = self.val
        return F.cross_entropy(model.network(images), labels).item()


TASKS: dict[str, Callable[[argparse.Namespace], LanguageTask | DigitsTask]] = {
    "language": LanguageTask,
    "digits": DigitsTask,
}


def optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]:
    """The example's own optimizer, and its schedule if it has one."""
    configured = model.configure_optimizers()
    if isinstance(configured, dict):
        return configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    return configured, None


def buckets(model: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
    """Parameters in the order in which their gradients become ready, about."""
    result: list[list[tuple[str, nn.Parameter]]] = [[]]
    for name, parameter in reversed(list(model.named_parameters())):
        if result[-1] and sum(other.numel() for _, other in result[-1]) + parameter.numel() > BUCKET_NUMEL:
            result.append([])
        result[-1].append((name, parameter))
    return result


def batches(numel: int, size: int, seed: int) -> Iterator[Tensor]:
    """Indices of random batches, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(numel, generator=generator)[: numel // size * size].view(-1, size)


def fit(task: LanguageTask | DigitsTask, spec: str, seed: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Trains one model; returns its final loss and the bytes sent, relative to an exact all-reduce."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer, schedule = optimizers(model)
    layout, codec, sent, exact = buckets(model), make(spec), 0.0, 0.0
    reductions = [
        Reduction(codec, [Segment(name, 0, len(p), p.numel() // len(p)) for name, p in bucket], arguments.nodes)
        for bucket in layout
    ]
    parts = batches(len(task.train if isinstance(task, LanguageTask) else task.train[0]), arguments.batch_size, seed)
    model.train()
    for _ in range(arguments.steps):
        gradients: list[list[Tensor]] = [[] for _ in layout]
        for _ in range(arguments.nodes):
            optimizer.zero_grad()
            (task.loss(model, next(parts)) / arguments.nodes).backward()
            for bucket, collected in zip(layout, gradients, strict=True):
                collected.append(torch.cat([parameter.grad.flatten() for _, parameter in bucket]))
        for bucket, collected, reduction in zip(layout, gradients, reductions, strict=True):
            with torch.no_grad():
                total, sent_bytes = reduction(collected)
            sent, exact = sent + sent_bytes, exact + reduction.exact_bytes
            parameters = [parameter for _, parameter in bucket]
            for parameter, gradient in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = gradient.view_as(parameter).clone()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    model.eval()
    with torch.no_grad():
        return task.final_loss(model), sent / exact


def make(spec: str) -> Codec | None:
    """The codec of ``name`` or ``name:argument``, perhaps with ``/raw`` behind; None for ``none``."""
    spec, _, raw = spec.partition("/")
    name, _, argument = spec.partition(":")
    if name == "none":
        return None
    codec = make_codec(name)
    if argument:
        codec = type(codec)(type(1.0 if "." in argument else 1)(argument))  # type: ignore[call-arg]
    if raw and isinstance(codec, BlockCodec):
        codec.preconditioned = False
    return codec


def main() -> None:
    """Prints a line for each codec."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="language", help="what is trained (default: %(default)s)")
    parser.add_argument(
        "--codecs",
        nargs="+",
        default=["int8", "int4", "int3", "bitmask", "topk", "lowrank"],
        metavar="NAME[:ARGUMENT][/raw]",
        help="what to compare with none (default: %(default)s)",
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="steps of a run (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=2, help="nodes, each with its own batch (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="samples a node and step (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the language model (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=2, help="of the language model (default: %(default)s)")
    parser.add_argument("--context", type=int, default=128, help="of the language model (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    task = TASKS[arguments.task](arguments)
    exact: list[float] = []
    print("codec            bytes   loss (least to most)          more than none, seed by seed")
    for spec in ["none", *arguments.codecs]:
        runs = [fit(task, spec, seed, arguments) for seed in range(arguments.seeds)]
        losses = [loss for loss, _ in runs]
        exact = exact or losses
        more = [loss - other for loss, other in zip(losses, exact, strict=True)]
        print(
            f"{spec:14s} {runs[0][1]:7.4f}   {statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})   "
            f"{statistics.mean(more):+.4f} ({min(more):+.4f} to {max(more):+.4f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
