"""A topology as a tree of text."""

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_hpc.comm.link_speed import LinkSpeed


def render_tree(domains: Any, links: Sequence[LinkSpeed] = (), labels: Sequence[str] = ()) -> str:
    """Draws nested domains with box characters, one line a domain.

    ::

        4 ranks, between nodes 23.9 MB/s, 52.1 µs
        ├─ node 0 (alpha): ranks 0, 2; within it 9.10 GB/s, 48.0 µs
        └─ node 1 (beta): ranks 1, 3; within it 9.10 GB/s, 48.0 µs

    Args:
        domains: Nested tuples, as `Topology` has them.
        links: Speed of each level, innermost first, or empty.
        labels: For each rank the name of its place, or empty.
    """
    return "\n".join(_Tree(domains, links, labels).lines())


class _Tree:
    def __init__(self, domains: Any, links: Sequence[LinkSpeed], labels: Sequence[str]) -> None:
        self._domains = domains
        self._links = links
        self._labels = labels
        self._seen: dict[int, int] = {}  # height -> number of domains drawn so far

    def lines(self) -> Iterator[str]:
        count = len(_ranks(self._domains))
        height = _height(self._domains)
        if height == 0:
            yield f"{_plural(count, 'rank')} in one domain{self._places(self._domains)}: {self._ranks(self._domains)}"
            return
        between = f"; between {domain_name(height - 1)}s {self._links[height]}" if self._links else ""
        yield f"{_plural(count, 'rank')} in {_plural(len(self._domains), domain_name(height - 1))}{between}"
        yield from self._children(self._domains, "")

    def _children(self, domain: Any, indent: str) -> Iterator[str]:
        for child in domain:
            last = child is domain[-1]
            height = _height(child)
            number = self._seen.get(height, 0)
            self._seen[height] = number + 1
            branch = "└─" if last else "├─"
            text = f"{domain_name(height)} {number}{self._places(child)}"
            if height == 0:
                yield f"{indent}{branch} {text}: {self._ranks(child)}"
                continue
            speed = f"; between its {domain_name(height - 1)}s {self._links[height]}" if self._links else ""
            yield f"{indent}{branch} {text}: {_plural(len(child), domain_name(height - 1))}{speed}"
            yield from self._children(child, indent + ("   " if last else "│  "))

    def _ranks(self, ranks: Sequence[int]) -> str:
        speed = f"; between them {self._links[0]}" if self._links and len(ranks) > 1 else ""
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}{speed}"

    def _places(self, domain: Any) -> str:
        names = dict.fromkeys(self._labels[rank] for rank in _ranks(domain)) if self._labels else {}
        if not names:
            return ""
        shown = list(names)[:3] + ([f"{len(names) - 3} more"] if len(names) > 3 else [])
        return f" ({', '.join(shown)})"


def domain_name(height: int) -> str:
    """What a domain is called whose children are ``height`` levels above ranks: node, group of nodes, …."""
    return ("node", "group")[height] if height < 2 else f"level-{height} group"


def _height(domain: Any) -> int:
    return 0 if isinstance(domain[0], int) else 1 + _height(domain[0])


def _ranks(domain: Any) -> list[int]:
    return [domain] if isinstance(domain, int) else [rank for item in domain for rank in _ranks(item)]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
