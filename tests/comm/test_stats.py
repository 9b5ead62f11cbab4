from lightning_hpc.comm.stats import CommStats, Decision


def test_bytes_of_a_levels_stages_are_summed() -> None:
    stats = CommStats()
    up, across, down = stats.count_bytes("intra_node"), stats.count_bytes("inter_node"), stats.count_bytes("intra_node")
    up.total, down.total = 5, 7
    assert stats.bytes_sent == {"intra_node": 12}  # a level that has sent nothing is left out
    across.total = 1
    assert stats.bytes_sent == {"intra_node": 12, "inter_node": 1}


def test_repr_says_all_and_counts_decisions() -> None:
    stats = CommStats(steps=3, reductions=4, exposed_seconds=1.23456)
    stats.count_bytes("inter_node").total = 12
    stats.codecs["int8"] += 8
    stats.fallbacks["sparse"] += 1
    stats.decisions.append(Decision(2, "int8", "it is fastest", {"int8": 0.1}, {"int8": 0.2}))
    assert repr(stats) == (
        "CommStats(steps=3, reductions=4, bytes_sent={'inter_node': 12}, codecs={'int8': 8}, fallbacks={'sparse': 1},"
        " exposed_seconds=1.235, decisions=1)"
    )
