import threading

import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_hpc.callbacks.logger_spans import LoggerSpans
from lightning_hpc.trace.timeline import Span, Timeline


class Failing(DummyLogger):
    def save(self) -> None:
        raise OSError("full")


@pytest.fixture
def spans() -> list[Span]:
    return []


@pytest.fixture
def timeline(spans: list[Span]) -> Timeline:
    return Timeline(iter(range(10**6)).__next__, lambda *step: None, spans.append)


def test_writing_is_a_span_also_when_it_fails(timeline: Timeline, spans: list[Span]) -> None:
    logger = Failing()
    LoggerSpans([logger], timeline)
    logger.log_metrics({})
    with pytest.raises(OSError, match="full"):
        logger.save()
    assert [(span.name, span.parent) for span in spans] == [("logging", "startup")] * 2


def test_another_thread_is_not_the_timelines_business(timeline: Timeline, spans: list[Span]) -> None:
    logger = DummyLogger()
    LoggerSpans([logger], timeline)
    thread = threading.Thread(target=logger.save)
    thread.start()
    thread.join()
    assert spans == []


def test_the_logger_is_left_as_it_was(timeline: Timeline) -> None:
    logger, wrapped_since = DummyLogger(), DummyLogger()
    before = dict(logger.__dict__)
    logger_spans = LoggerSpans([logger, wrapped_since], timeline)
    outer = lambda *args, **kwargs: None  # noqa: E731
    wrapped_since.save = outer  # type: ignore[method-assign]
    logger_spans.close()
    assert logger.__dict__ == before
    assert wrapped_since.__dict__["save"] is outer
