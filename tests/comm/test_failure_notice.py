import threading
import time
from datetime import timedelta

from torch.distributed import HashStore, TCPStore

from lightning_hpc.comm.failure_notice import FailureNotice
from tests.helpers import run_ranks


def test_all_others_hear_and_are_interrupted() -> None:
    store = HashStore()
    interrupted = [threading.Event() for _ in range(3)]
    notices = [FailureNotice(store, rank, 3, interrupted[rank].set) for rank in range(3)]
    assert [notice.text() for notice in notices] == [None] * 3
    notices[1].tell("rank 1 ran out of memory")
    assert all(interrupted[rank].wait(10) for rank in (0, 2))
    assert [notice.text() for notice in notices] == ["rank 1 ran out of memory", None, "rank 1 ran out of memory"]
    assert not interrupted[1].is_set()
    for notice in notices:
        notice.close()


def test_nobody_waits_long_for_a_rank_that_is_gone() -> None:
    store = HashStore()
    notice = FailureNotice(store, 0, 2, lambda: None)
    start = time.monotonic()
    notice.tell("rank 0 ran out of memory")
    assert time.monotonic() - start < 20


def test_close_ends_the_thread() -> None:
    before = threading.active_count()
    notice = FailureNotice(HashStore(), 0, 1, lambda: None)
    assert threading.active_count() == before + 1
    notice.close()
    assert threading.active_count() == before


def lose_the_store(rank: int, world_size: int) -> str | None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    notice = FailureNotice(client, 0, 1, lambda: None)
    del store
    notice._thread.join(20)
    assert not notice._thread.is_alive()
    return notice.text()


def test_where_the_store_is_gone_the_thread_ends_quietly() -> None:
    assert run_ranks(lose_the_store, 1, init_gloo=False) == [None]
