from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.topology import Topology

LINKS = [LinkSpeed(48e-6, 9.1e9), LinkSpeed(52.1e-6, 23.9e6), LinkSpeed(1e-3, 2e6)]


def test_a_flat_topology_is_one_line() -> None:
    assert Topology.flat(3).render() == "3 ranks in one domain: ranks 0, 1, 2"
    assert Topology.flat(1).render(["alpha"]) == "1 rank in one domain (alpha): rank 0"


def test_racks_with_speeds_and_places() -> None:
    topology = Topology.from_lists([[[0, 1], [2, 3]], [[4, 5], [6]]], LINKS)
    assert topology.render(["a", "a", "b", "b", "c", "c", "d"]) == "\n".join(
        [
            "7 ranks in 2 groups; between groups 2.00 MB/s, 1.00 ms",
            "├─ group 0 (a, b): 2 nodes; between its nodes 23.9 MB/s, 52.1 µs",
            "│  ├─ node 0 (a): ranks 0, 1; between them 9.10 GB/s, 48.0 µs",
            "│  └─ node 1 (b): ranks 2, 3; between them 9.10 GB/s, 48.0 µs",
            "└─ group 1 (c, d): 2 nodes; between its nodes 23.9 MB/s, 52.1 µs",
            "   ├─ node 2 (c): ranks 4, 5; between them 9.10 GB/s, 48.0 µs",
            "   └─ node 3 (d): rank 6",
        ]
    )


def test_many_places_are_counted() -> None:
    assert Topology.flat(5).render("abcde").startswith("5 ranks in one domain (a, b, c, 2 more)")
