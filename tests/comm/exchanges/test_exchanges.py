"""The invariants of codecs on the outermost level, for every codec and several topologies.

Starting processes is slow, so all scenarios of a topology run in the same ones; each returns what it found wrong.
"""

import functools
import io
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hpc.comm.exchanges.coded import NON_FINITE, CodecExchange, FeedbackSettings
from lightning_hpc.comm.layout import ParameterSpec
from lightning_hpc.comm.topology import Topology
from tests.comm.exchanges.engine import (
    ALL_CODECS,
    BUCKETS,
    OTHER_BUCKETS,
    SHAPES,
    SINGLE_BUCKETS,
    SPECS,
    Engine,
    flatten,
    gradients_of,
    mean_of,
    place,
    same_bits,
    same_on_all_ranks,
    summed,
)
from tests.helpers import run_ranks

STEPS = 6
PRECONDITIONED = ("int4", "int3")
ODD = 1  # the rank whose gradients are unlike the others'
Problems = Iterator[str]


def offset_of(name: str) -> int:
    names = list(SHAPES)
    return sum(SPECS[other].numel for other in names[: names.index(name)])


def check_invariants(rank: int, domains: list[Any]) -> Problems:
    """Same bits on all ranks; nothing is lost for good; other buckets, slices and a checkpoint change no bit."""
    engine, recut, resumed = Engine(domains), Engine(domains, slice_bytes=2000), Engine(domains, slice_bytes=10**6)
    saved = io.BytesIO()
    arrived: dict[tuple[str, int], Tensor] = {}
    for step in range(STEPS):
        if step == STEPS // 2:
            torch.save(engine.reducer.state_dict(), saved)
        for codec in ALL_CODECS:
            arrived[codec, step] = engine.step(codec, gradients_of(rank, step))
            if not same_on_all_ranks(arrived[codec, step]):
                yield f"{codec}, step {step}: ranks hold different bits"
    for codec in ALL_CODECS:
        total = sum(arrived[codec, step].double() for step in range(STEPS))
        true = sum(mean_of(step, engine.world_size) for step in range(STEPS))
        kept = summed(place(engine.residuals(codec)))
        if codec != "bf16" and not kept.any():
            yield f"{codec}: nothing is kept"
        for name, spec in SPECS.items():
            part = slice(offset_of(name), offset_of(name) + spec.numel)
            scale = true[part].abs().max().item() if spec.numel else 0.0
            if spec.numel and (total + kept - true)[part].abs().max().item() > 1e-5 * scale:
                yield f"{codec}, {name}: delivered + kept differs from what was given by {(total + kept - true)[part]}"

    for step in range(STEPS):
        for codec in ALL_CODECS:
            # As DDP does: one layout in the first step, others later, the first one again.
            buckets = [BUCKETS, OTHER_BUCKETS, SINGLE_BUCKETS, OTHER_BUCKETS, BUCKETS, BUCKETS][step]
            if not same_bits(recut.step(codec, gradients_of(rank, step), buckets), arrived[codec, step]):
                yield f"{codec}, step {step}: other buckets give other bits"
    resumed.reducer.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    for step in range(STEPS // 2, STEPS):
        for codec in ALL_CODECS:
            buckets = OTHER_BUCKETS if step % 2 else BUCKETS
            if not same_bits(resumed.step(codec, gradients_of(rank, step), buckets), arrived[codec, step]):
                yield f"{codec}, step {step}: the resumed run differs"
    for codec in ALL_CODECS:
        for other in (recut, resumed):
            mine, others = engine.residuals(codec), other.residuals(codec)
            if mine.keys() != others.keys() or not all(same_bits(mine[key], others[key]) for key in mine):
                yield f"{codec}: other state at the end, {engine.slice_bytes} against {other.slice_bytes}"
    for codec in ALL_CODECS:
        mine = {key: value for key, value in engine.residuals(codec).items() if key.startswith("magnitudes/")}
        nodes: list[dict[str, Tensor]] = [{} for _ in range(engine.world_size)]
        dist.all_gather_object(nodes, mine)
        if any(not same_bits(value, other[key]) for other in nodes for key, value in mine.items() if key in other):
            yield f"{codec}: nodes know other magnitudes"
        known = {key for other in nodes for key in other}
        if codec in PRECONDITIONED and not all(sum(key in other for other in nodes) > 1 for key in known):
            yield f"{codec}: some magnitudes are known to one node only"
        if bool(known) != (codec in PRECONDITIONED):
            yield f"{codec}: magnitudes of {known} are kept"
    for each in (engine, recut, resumed):
        if each.stats.fallbacks:
            yield f"fallbacks {each.stats.fallbacks}"
        each.close()


def check_without_feedback(rank: int, domains: list[Any]) -> Problems:
    engine = Engine(domains, feedback=FeedbackSettings(is_used=False))
    for codec in ALL_CODECS:
        first, second = (engine.step(codec, gradients_of(rank, 0)) for _ in range(2))
        if any(key.startswith("residuals") for key in engine.residuals(codec)):
            yield f"{codec}: residuals are kept"
        if codec == "lowrank":
            continue  # keeps its basis
        if same_bits(first, second) != (codec not in PRECONDITIONED):
            yield f"{codec}: the second step depends on the first, or not on the magnitudes that were received"
        error = (first.double() - mean_of(0, engine.world_size)).norm() / mean_of(0, engine.world_size).norm()
        bound = {"bf16": 4e-3, "fp16": 5e-4, "int8": 2e-2, "int4": 0.25}.get(codec, 0.95)
        if not 0 < error < bound:
            yield f"{codec}: relative error {error}"
        if not same_on_all_ranks(first):
            yield f"{codec}: ranks hold different bits"
    engine.close()


def check_dtypes(rank: int, domains: list[Any]) -> Problems:
    engine = Engine(domains)
    for dtype, rounding in ((torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-9)):
        engine.reducer.load_state_dict({})
        for codec in ALL_CODECS:
            total, true, size = torch.zeros(()), torch.zeros(()), torch.zeros(())
            for step in range(3):
                gradients = gradients_of(rank, step, dtype)
                arrived = engine.step(codec, gradients, [BUCKETS, OTHER_BUCKETS, BUCKETS][step])
                if arrived.dtype != dtype or not same_on_all_ranks(arrived):
                    yield f"{codec}, {dtype}: {arrived.dtype}, or different bits"
                total = total + arrived.double()
                true = true + mean_of(step, engine.world_size, dtype)
                size = size + mean_of(step, engine.world_size, dtype).abs()
            missing = total + summed(place(engine.residuals(codec))) - true
            for name, spec in SPECS.items():
                part = slice(offset_of(name), offset_of(name) + spec.numel)
                # What a sum loses by rounding to the gradient's own dtype is nobody's residual.
                if spec.numel and missing[part].abs().max() > 4 * rounding * size[part].max() + 1e-5:
                    yield f"{codec}, {dtype}, {name}: delivered + kept is off by {missing[part].abs().max()}"

    engine.step("int4", gradients_of(rank, 0))
    before = engine.stats.fallbacks["dtype"]
    for dtype in (torch.complex64, torch.float64):
        tensors = [
            torch.randn(4096, generator=torch.Generator().manual_seed(other), dtype=dtype)
            for other in range(engine.world_size)
        ]
        arrived = engine.reducer(tensors[rank].clone(), True, [SPECS["square.weight"]]).wait()
        torch.testing.assert_close(arrived, torch.stack(tensors).mean(0), rtol=1e-6, atol=1e-6)
    if engine.stats.fallbacks["dtype"] - before != 2:
        yield f"dtype fallbacks: {engine.stats.fallbacks}"
    for codec in ALL_CODECS:
        if engine.step(codec, {name: torch.zeros(0) for name in SHAPES}, [["empty"]]).numel():
            yield f"{codec}: something arrived in an empty bucket"

    # An embedding's sparse gradient.
    row = torch.tensor([[rank, 9]])
    sparse = torch.sparse_coo_tensor(row, torch.full((2, 3), float(rank + 1)), (10, 3), check_invariants=True)
    dense = engine.reducer(sparse, True, [ParameterSpec("embedding", 30, 10)]).wait().to_dense()
    ranks = range(engine.world_size)
    want = torch.zeros(10, 3)
    for other in ranks:
        want[other] += (other + 1) / engine.world_size
        want[9] += (other + 1) / engine.world_size
    torch.testing.assert_close(dense, want)
    if engine.stats.fallbacks["sparse"] != 1:
        yield f"sparse fallbacks: {engine.stats.fallbacks}"
    engine.close()


def check_idle(rank: int, domains: list[Any]) -> Problems:
    """What is delivered for a parameter without gradient is thrown away by DDP, and yet nothing is lost."""
    engine = Engine(domains, feedback=FeedbackSettings(spares_idle=True))
    idle_everywhere, idle_here = ("wide.weight", "vector", "temperature"), "square.weight"
    for codec in ALL_CODECS:
        balance = torch.zeros(sum(spec.numel for spec in SPECS.values()), dtype=torch.float64)
        for step in range(STEPS):
            gradients = gradients_of(rank, step)
            used = torch.ones_like(balance)
            for name in idle_everywhere if step % 2 else ():
                gradients[name].zero_()
                used[offset_of(name) : offset_of(name) + SPECS[name].numel] = 0
            if step == STEPS - 1 and rank == ODD:
                gradients[idle_here].zero_()
            arrived = engine.step(codec, gradients)
            if not same_on_all_ranks(arrived):
                yield f"{codec}, step {step}: ranks hold different bits"
            given = summed(flatten(gradients).double()) / engine.world_size
            balance += arrived.double() * used - given
        kept = summed(place(engine.residuals(codec)))
        for name, spec in SPECS.items():
            part = slice(offset_of(name), offset_of(name) + spec.numel)
            scale = gradients_of(0, 0)[name].abs().max().item() if spec.numel else 0.0
            if spec.numel and (balance + kept)[part].abs().max().item() > 1e-4 * scale:
                yield f"{codec}, {name}: delivered + kept differs from what was given by {(balance + kept)[part]}"
    engine.close()


def spoil(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients["wide.weight"][10], gradients["wide.weight"][20] = float("nan"), float("inf")
    gradients["conv.weight"][1000] = float("-inf")
    return gradients


def spoilt_parts(engine: Engine, codec: str) -> set[tuple[str, int, int]]:
    """Parts of this rank in slices that cannot be packed."""
    found: set[tuple[str, int, int]] = set()
    for run in engine.runs(codec):
        if any(
            name == spoilt and start <= element < start + numel
            for name, start, numel in run
            for spoilt, element in (("wide.weight", 10), ("wide.weight", 20), ("conv.weight", 1000))
        ):
            found |= set(run)
    return found


def mask_of(parts: set[tuple[str, int, int]]) -> Tensor:
    """Which elements some rank counts among its parts; a collective."""
    mask = torch.zeros(len(mean_of(0, 1)))
    for name, start, numel in parts:
        mask[offset_of(name) + start : offset_of(name) + start + numel] = 1
    return summed(mask) > 0


def check_non_finite(rank: int, domains: list[Any], poisoned: bool = False) -> Problems:
    """One rank has NaN and inf in one step. With ``poisoned``, as on CUDA: such a slice becomes NaN altogether."""
    engine, clean = Engine(domains), Engine(domains)
    codecs = [codec for codec in ALL_CODECS if not poisoned or codec not in ("bitmask", "topk")]
    for codec in codecs:
        parts = spoilt_parts(engine, codec)
        mask = mask_of(parts)
        total, true = torch.zeros(len(mask), dtype=torch.float64), torch.zeros(len(mask), dtype=torch.float64)
        for step in range(4):
            gradients, before = gradients_of(rank, step), engine.residuals(codec)
            unspoilt = clean.step(codec, gradients_of(rank, step))
            if step != 2:
                arrived = engine.step(codec, gradients)
                total += arrived.double()
                true += mean_of(step, engine.world_size)
                continue
            counted = engine.stats.fallbacks["non_finite"]
            arrived = engine.step(codec, spoil(gradients) if rank == ODD else gradients)
            counted = engine.stats.fallbacks["non_finite"] - counted
            slices = sum(bool(parts.intersection(run)) for run in engine.runs(codec))
            if counted != (0 if poisoned else slices):
                yield f"{codec}: {counted} fallbacks counted, {slices} slices spoilt"
            if not same_on_all_ranks(arrived.nan_to_num(7.0)) or not same_on_all_ranks(arrived.isnan()):
                yield f"{codec}: ranks hold different bits"
            exact = engine.step("none", spoil(gradients_of(rank, step)) if rank == ODD else gradients_of(rank, step))
            if poisoned:
                exact = torch.where(mask, torch.nan, exact)
            as_it_is = ~mask_of({part for run in engine.runs(codec) for part in run}) | mask
            if not torch.equal(arrived[as_it_is].nan_to_num(7.0), exact[as_it_is].nan_to_num(7.0)):
                yield f"{codec}: not the exact mean"
            if not (arrived[mask].isnan().any() and (poisoned or arrived[mask].isinf().any())):
                yield f"{codec}: NaN and inf are lost"
            mask = as_it_is
            if not same_bits(arrived[~mask], unspoilt[~mask]):
                yield f"{codec}: other slices are changed"
            after = engine.residuals(codec)
            spoilt = {f"{start}:{name}" for name, start, _ in parts}
            touched = {key.split("/")[1] for key in before if not same_bits(before[key], after[key])}
            if spoilt & touched:
                yield f"{codec}: residuals of {spoilt & touched} are touched"
            if engine.runs(codec) and any(engine.runs(codec)) and codec != "lowrank" and not touched:
                yield f"{codec}: no residual is touched"
            total[~mask] += arrived[~mask].double()
            true[~mask] += mean_of(step, engine.world_size)[~mask]
        missing = total + summed(place(engine.residuals(codec))) - true
        for name, spec in SPECS.items():
            part = slice(offset_of(name), offset_of(name) + spec.numel)
            if spec.numel and not missing[part].abs().max() <= 1e-5 * true[part].abs().max():
                yield f"{codec}, {name}: delivered + kept is off by {missing[part].abs().max()}"
    engine.close()
    clean.close()


def check_poisoned(rank: int, domains: list[Any]) -> Problems:
    def take_word(self: CodecExchange, item: Any, refused: Tensor) -> bool:
        item.poisoned = refused
        return False

    def agreed(self: CodecExchange, item: Any, words: Tensor) -> None:
        take_word(self, item, (words == NON_FINITE).any())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CodecExchange, "_take_word", take_word)
        patch.setattr(CodecExchange, "agreed", agreed)
        yield from check_non_finite(rank, domains, poisoned=True)


def check_dense(rank: int, domains: list[Any]) -> Problems:
    """Bitmask: one node finds a slice too dense, and all send it uncompressed."""
    engine = Engine(domains)
    node = engine.topology.nodes[0]

    def gradients(step: int) -> dict[str, Tensor]:
        mine = gradients_of(rank, step)
        if step == 1 and rank in node:
            # All of one magnitude once what the node has kept is added.
            mine["vector"] = torch.full((SPECS["vector"].numel,), 1e9)
        return mine

    before: dict[str, Tensor] = {}
    for step in range(3):
        counted, before = engine.stats.fallbacks["dense"], engine.residuals("bitmask")
        arrived = engine.step("bitmask", gradients(step))
        counted = engine.stats.fallbacks["dense"] - counted
        if not same_on_all_ranks(arrived):
            yield f"step {step}: ranks hold different bits"
        mine = [part for run in engine.runs("bitmask") for part in run if part[0] == "vector"]
        if counted != (len(mine) if step == 1 else 0):
            yield f"step {step}: {counted} fallbacks counted, {len(mine)} slices"
        if step == 1:
            exact = engine.step("none", gradients(step))
            part = slice(offset_of("vector"), offset_of("vector") + SPECS["vector"].numel)
            if not same_bits(arrived[part], exact[part]):
                yield "not the exact mean"
            after = engine.residuals("bitmask")
            if not all(same_bits(before[key], after[key]) for key in before if key.endswith(":vector")):
                yield "residuals are touched"
    engine.close()


def check_bytes(rank: int, domains: list[Any]) -> Problems:
    """What is counted is what is handed to the backend; and no two stages use the same group."""
    handed: list[int] = []
    threads: dict[dist.ProcessGroup, set[str]] = defaultdict(set)
    all_to_all, all_reduce = dist.all_to_all_single, dist.all_reduce

    def counting_all_to_all(output: Tensor, whole: Tensor, **kwargs: Any) -> Any:
        splits = list(kwargs["input_split_sizes"])
        threads[kwargs["group"]].add(threading.current_thread().name)
        del splits[dist.get_group_rank(kwargs["group"], rank)]
        handed.append(sum(splits) * whole.element_size())
        return all_to_all(output, whole, **kwargs)

    def counting_all_reduce(tensor: Tensor, **kwargs: Any) -> Any:
        threads[kwargs["group"]].add(threading.current_thread().name)
        size = dist.get_world_size(kwargs["group"])
        handed.append(2 * (size - 1) * tensor.numel() * tensor.element_size() // size)
        return all_reduce(tensor, **kwargs)

    engine = Engine(domains)
    outermost = f"level_{engine.topology.depth - 1}" if engine.topology.depth > 2 else "inter_node"
    dist.all_to_all_single, dist.all_reduce = counting_all_to_all, counting_all_reduce
    sent = {}
    try:
        for codec in ("none", *ALL_CODECS):
            before, outer = sum(engine.stats.bytes_sent.values()), engine.stats.bytes_sent.get(outermost, 0)
            handed.clear()
            engine.step(codec, gradients_of(rank, 0), [["wide.weight", "square.weight", "vector"]])
            counted = sum(engine.stats.bytes_sent.values()) - before
            if counted != sum(handed):
                yield f"{codec}: {counted} bytes counted, {sum(handed)} handed over"
            sent[codec] = engine.stats.bytes_sent.get(outermost, 0) - outer
        if any(len(names) > 1 for names in threads.values()):
            yield f"several stages share a group, so that ranks may use it in another order: {threads}"
    finally:
        dist.all_to_all_single, dist.all_reduce = all_to_all, all_reduce
    for codec, total in zip(sent, summed(torch.tensor([float(sent[codec]) for codec in sent])).tolist(), strict=True):
        sent[codec] = total
    limits = {
        "bf16": 0.53,
        "fp16": 0.53,
        "int8": 0.27,
        "int4": 0.14,
        "int3": 0.1,
        "topk": 0.08,
        "lowrank": 0.6,
        "sign": 0.05,
    }
    for codec, limit in limits.items():
        if sent[codec] > limit * sent["none"]:
            yield f"{codec}: {sent[codec] / sent['none']} of exact"
    engine.close()


def check_flush(rank: int, domains: list[Any]) -> Problems:
    """The first pass after a change of codec delivers all that the former one had kept."""
    engine = Engine(domains)
    for codec, following in zip(ALL_CODECS, (*ALL_CODECS[1:], "none"), strict=True):
        engine.reducer.use("none")
        engine.pass_(gradients_of(rank, 9))  # what the last round's codec had kept goes
        engine.reducer.use(codec)
        passes = [engine.pass_(gradients_of(rank, step), OTHER_BUCKETS if step else BUCKETS) for step in range(2)]
        engine.reducer.use(codec)  # no change
        passes.append(engine.pass_(gradients_of(rank, 2)))
        engine.reducer.use(following)
        passes.append(engine.pass_(gradients_of(rank, 3)))
        if not same_on_all_ranks(passes[-1]):
            yield f"{codec}: ranks hold different bits"
        if place(engine.residuals(codec)).any():
            yield f"{codec}: something is kept"
        missing = sum(arrived.double() for arrived in passes) - sum(
            mean_of(step, engine.world_size) for step in range(4)
        )
        scale = passes[0].abs().max()
        if missing.abs().max() > 1e-5 * scale:
            yield f"{codec}: delivered is off by {missing.abs().max()} of {scale}"
        if not same_bits(engine.pass_(gradients_of(rank, 4)), engine.step(following, gradients_of(rank, 4))) and (
            following == "none"
        ):
            yield f"{codec}: the pass after that is not {following}"
    engine.close()


SCENARIOS: dict[str, Callable[[int, list[Any]], Problems]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_invariants,
        check_without_feedback,
        check_dtypes,
        check_idle,
        check_non_finite,
        check_poisoned,
        check_dense,
        check_bytes,
        check_flush,
    )
}


# All scenarios where two ranks cross and where three do, which sum in another way; elsewhere what nesting bears on.
TOPOLOGIES: list[tuple[list[Any], tuple[str, ...]]] = [
    ([[0], [1]], tuple(SCENARIOS)),
    ([[0], [1], [2]], tuple(SCENARIOS)),
    ([[0, 1], [2, 3]], ("invariants", "non_finite", "dense")),
    ([[0], [1, 2]], ("invariants", "poisoned", "flush")),
    ([[0, 1], [2, 3, 4]], ("invariants", "idle", "bytes", "without_feedback")),
    ([[[0], [1, 2]], [[3], [4, 5]]], ("invariants", "non_finite", "dtypes")),
]


def _run_scenarios(rank: int, world_size: int, domains: list[Any], names: tuple[str, ...]) -> dict[str, list[str]]:
    return {name: list(SCENARIOS[name](rank, domains)) for name in names}


@functools.cache
def _problems(topology: int) -> list[dict[str, list[str]]]:
    domains, names = TOPOLOGIES[topology]
    return run_ranks(_run_scenarios, Topology.from_lists(domains).world_size, domains, names, timeout=150)


@pytest.mark.parametrize(
    ("topology", "scenario"),
    [
        pytest.param(index, name, id=f"{domains}-{name}")
        for index, (domains, names) in enumerate(TOPOLOGIES)
        for name in names
    ],
)
def test_exchanges(topology: int, scenario: str) -> None:
    for rank, problems in enumerate(_problems(topology)):
        assert not problems[scenario], f"rank {rank}"
