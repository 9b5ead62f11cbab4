"""Where the ranks of a job live: nested domains such as ranks in a host, hosts in a rack."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from typing_extensions import Self

from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.topology_view import render_tree

Domain: TypeAlias = tuple[Any, ...]
"""Either ranks, or domains one level further in; never both. (mypy cannot index the recursive type.)"""

_FORMAT = "lightning_hpc.topology/1"
_EXAMPLE = "write ranks by node, for example [[0, 1], [2, 3]] for two nodes of two ranks"


@dataclass(frozen=True)
class Topology:
    """The ranks of a job in nested domains, outermost first.

    ``Topology.from_lists([[0, 1], [2, 3]])`` is two nodes of two ranks. One more bracket is one more level, such as
    racks of nodes: ``[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]``. Nodes may differ in size; every rank lies at the same
    depth. A level that holds a single domain says nothing and is dropped, so that ``[[0, 1, 2]]`` equals ``[0, 1, 2]``.

    Attributes:
        domains: The nested ranks.
        links: Speed of each level, innermost first, or empty where nobody has measured it. Topologies that group ranks
            alike are equal, whatever their speed.
        source: The file that it was read from, or empty. Error messages name it.

    Raises:
        ValueError: If the ranks are not 0 … n-1, each once, all at the same depth, or there are links for other than
            all levels.
    """

    domains: Domain
    links: tuple[LinkSpeed, ...] = field(default=(), compare=False)
    source: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_shape(self.domains)
        domains = self.domains
        while len(domains) == 1 and not isinstance(domains[0], int):
            domains = domains[0]
        object.__setattr__(self, "domains", domains)
        ranks = list(_ranks(domains))
        twice = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
        if twice:
            raise ValueError(f"the topology {self} has rank {twice[0]} more than once; {_EXAMPLE}")
        if sorted(ranks) != list(range(len(ranks))):
            present = set(ranks)  # the numbers themselves may be huge
            missing = next(rank for rank in range(len(ranks)) if rank not in present)
            raise ValueError(f"the topology {self} leaves out rank {missing}; {_EXAMPLE}")
        if len(self.links) not in (0, self.depth):
            raise ValueError(f"the topology {self} has {self.depth} levels, but {len(self.links)} links: one a level")

    @classmethod
    def flat(cls, world_size: int) -> Self:
        """All ranks in one domain."""
        return cls(tuple(range(world_size)))

    @classmethod
    def from_lists(cls, lists: Sequence[Any], links: Sequence[LinkSpeed] = ()) -> Self:
        """Takes nested lists or tuples, as they come from YAML or JSON, and the speed of each level if known.

        Raises:
            ValueError: If they are no topology; the message quotes what is wrong.
        """
        return cls(_to_tuples(lists), tuple(links))

    @classmethod
    def from_node_ranks(cls, node_ranks: Sequence[int]) -> Self:
        """Groups ranks by the node number that each one's launcher gave it: ``node_ranks[rank]``."""
        nodes: dict[int, list[int]] = {}
        for rank, node in enumerate(node_ranks):
            nodes.setdefault(node, []).append(rank)
        return cls.from_lists([nodes[node] for node in sorted(nodes)])

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file that `save` wrote.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is not a topology file, or its content is no topology.
        """
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"topology={str(path)!r} is not 'auto', 'flat' or the path of a saved topology")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content.get("format") != _FORMAT:
                raise ValueError(f'it lacks "format": "{_FORMAT}"')
            links = [LinkSpeed(**link) for link in content.get("links", [])]
            return replace(cls.from_lists(content.get("domains", []), links), source=str(file))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not a saved topology: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the topology as a small JSON file, with the speed of its levels if known."""
        Path(path).write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """What `save` writes. `load` ignores further keys, so a file may say more."""
        content: dict[str, Any] = {"format": _FORMAT, "domains": self.domains}
        if self.links:
            content["links"] = [asdict(link) for link in self.links]
        return content

    def render(self, labels: Sequence[str] = ()) -> str:
        """The topology as a tree of text, with the speed of its levels if known.

        Args:
            labels: A name for each rank's place, such as its host; a domain shows those of its ranks.
        """
        return render_tree(self.domains, self.links, labels)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in the order in which they stand in the domains."""
        return tuple(_ranks(self.domains))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def depth(self) -> int:
        """Number of levels: 1 for a flat topology, 2 for nodes, 3 for racks of nodes."""
        depth, domain = 1, self.domains[0]
        while not isinstance(domain, int):
            depth, domain = depth + 1, domain[0]
        return depth

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The innermost domains, each a tuple of ranks."""
        return tuple(innermost(self.domains))

    def require_world_size(self, world_size: int) -> None:
        """Checks that the topology covers exactly the ranks of a job.

        Raises:
            ValueError: If it does not; the message quotes both, and the file that the topology was read from.
        """
        if self.world_size != world_size:
            origin = f" of {self.source}" if self.source else ""
            raise ValueError(
                f"the topology {self}{origin} names {self.world_size} of the job's {world_size} ranks"
                " (devices x num_nodes); it must name each of them once"
            )

    def __str__(self) -> str:
        return json.dumps(self.domains)


def innermost(domain: Domain) -> Iterator[tuple[int, ...]]:
    """Yields the domains that hold ranks, from left to right."""
    if isinstance(domain[0], int):
        yield domain
    else:
        for item in domain:
            yield from innermost(item)


def _to_tuples(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_to_tuples(item) for item in value)
    if hasattr(value, "tolist"):  # numpy's arrays and integers
        return _to_tuples(value.tolist())
    return value


def _check_shape(domains: Any) -> None:
    """Raises unless ``domains`` is nested, non-empty tuples with ranks at one depth."""
    if not isinstance(domains, tuple):
        raise ValueError(f"topology={domains!r} is not a list of ranks or of domains; {_EXAMPLE}")
    text = json.dumps(domains, default=repr)
    depths = set(_depths(domains, text, 1))
    if len(depths) > 1:
        raise ValueError(f"the topology {text} has ranks at different depths ({sorted(depths)}); {_EXAMPLE}")


def _depths(domain: tuple[Any, ...], text: str, depth: int) -> Iterator[int]:
    if not domain:
        raise ValueError(f"the topology {text} has an empty domain; {_EXAMPLE}")
    for item in domain:
        if isinstance(item, tuple):
            yield from _depths(item, text, depth + 1)
        elif isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            yield depth
        else:
            raise ValueError(f"the topology {text} has {item!r} where a rank (0, 1, …) must stand; {_EXAMPLE}")


def _ranks(domain: Domain) -> Iterator[int]:
    for item in domain:
        if isinstance(item, int):
            yield item
        else:
            yield from _ranks(item)
