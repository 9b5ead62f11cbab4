import itertools

import pytest

from lightning_hpc.comm.schedule import sample, tournament, waves


@pytest.mark.parametrize("count", [0, 1, 2, 5, 8])
def test_a_tournament_has_all_pairs_in_rounds_of_disjoint_ones(count: int) -> None:
    pairs = list(tournament(range(count)))
    assert sorted(pairs) == list(itertools.combinations(range(count), 2))
    for start in range(0, len(pairs), max(count // 2, 1)):
        of_round = pairs[start : start + count // 2]
        assert len(set(itertools.chain(*of_round))) == 2 * len(of_round)


def test_all_pairs_of_few_and_some_of_many() -> None:
    assert sorted(sample(range(16))) == list(itertools.combinations(range(16), 2))
    pairs = list(sample(range(40)))
    assert len(pairs) == len(set(pairs)) <= 40 * 6
    assert {rank for pair in pairs for rank in pair} == set(range(40))


def test_waves_have_every_pair_once_and_no_host_twice() -> None:
    hosts = [rank // 4 for rank in range(16)]
    pairs = list(itertools.combinations(range(16), 2))
    planned = list(waves(pairs, hosts, machines=hosts))
    assert sorted(itertools.chain(*planned)) == pairs
    for wave in planned:
        busy = [host for pair in wave for host in {hosts[rank] for rank in pair}]
        assert len(busy) == len(set(busy))


def test_one_machine_that_emulates_all_has_two_tests_at_once_or_one_within_a_host() -> None:
    hosts = [rank // 4 for rank in range(16)]
    for wave in waves(itertools.combinations(range(16), 2), hosts, machines=[0] * 16):
        assert len(wave) <= (1 if any(hosts[a] == hosts[b] for a, b in wave) else 2)
