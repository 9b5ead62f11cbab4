"""One rank of a job that only probes, for `benchmarks/cluster.py`; every rank prints its results as lines of JSON.

Ranks may be dealt to the cluster's places in any order, and the guess at hosts may be spoilt: the probe must not care.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from lightning_hpc.comm import probe as probe_module
from lightning_hpc.comm.probe import ProbeResult, probe
from lightning_hpc.comm.rank_facts import RankFacts, gather_facts


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", help="the rank of each place of the cluster, in order")
    parser.add_argument("--repeats", type=int, default=1, help="number of probes (default: %(default)s)")
    parser.add_argument(
        "--guess", choices=("right", "apart", "together"), default="right", help="what hosts the probe is told of"
    )
    arguments = parser.parse_args()
    _join_group(arguments.ranks)
    with mock.patch.object(probe_module, "gather_facts", _spoilt(arguments.guess)):
        for _ in range(arguments.repeats):
            print(_line(probe()), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _join_group(ranks: Sequence[int] | None) -> None:
    place, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    # Its server is at the first place, whichever rank sits there.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world_size, is_master=place == 0, timeout=timedelta(seconds=60))
    rank = ranks[place] if ranks else place
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))


def _spoilt(guess: str) -> Callable[[RankFacts, dist.ProcessGroup], tuple[list[RankFacts], list[int]]]:
    def gather(facts: RankFacts, group: dist.ProcessGroup) -> tuple[list[RankFacts], list[int]]:
        everyone, hosts = gather_facts(facts, group)
        return everyone, {"right": hosts, "apart": list(range(len(hosts))), "together": [0] * len(hosts)}[guess]

    return gather


def _line(result: ProbeResult) -> str:
    return json.dumps(
        {
            "domains": result.topology.domains,
            "links": [asdict(link) for link in result.links],
            "warnings": result.warnings,
            "seconds": result.seconds,
        }
    )


if __name__ == "__main__":
    main()
