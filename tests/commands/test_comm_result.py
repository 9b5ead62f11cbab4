import pytest

from lightning_hpc.commands.comm_result import summarize
from lightning_hpc.commands.timed_fit import TimedFit


def fit(*seconds: float, **rest: object) -> TimedFit:
    return TimedFit(list(seconds), 1000, **rest)  # type: ignore[arg-type]


def test_medians_ratios_bytes_and_errors() -> None:
    predicted = {"ddp": 0.5, "int8": 0.3}
    rounds = {
        "ddp": [[fit(0.4, 0.4)], [fit(0.6, 0.6)]],
        "none": [[fit(0.3, predicted=predicted)], []][:1],
        "int8": [[fit(0.2, sent_bytes={"inter_node": 5.0}), fit(9.0, sent_bytes={"inter_node": 7.0})], [fit(0.25)]][:1],
        "auto": [[fit(0.2, choice="int8", exposed_seconds=0.05), fit(0.2, exposed_seconds=0.15)]],
        "topk": [],
    }
    results = {result.strategy: result for result in summarize(rounds, world_size=4)}
    assert "topk" not in results
    assert results["ddp"].step_seconds == pytest.approx(0.5)
    assert results["ddp"].sent_bytes == {"all_ranks": 6000.0}
    assert results["ddp"].prediction_error == pytest.approx(0.0)
    assert results["int8"].speedup == pytest.approx(2.5)
    assert results["int8"].speedup_range == pytest.approx((2.0, 3.0))
    assert results["int8"].sent_bytes == {"inter_node": 7.0}
    assert results["int8"].prediction_error == pytest.approx(0.5)
    assert results["auto"].choice == ("int8",)
    assert results["auto"].predicted_seconds == pytest.approx(0.3)
    assert results["auto"].exposed_share == pytest.approx(0.5)
    assert results["none"].predicted_seconds is None


def test_exposed_share_is_of_the_same_steps_and_never_above_one() -> None:
    # All of each step is exposed, and a few slow ones pull the mean far above the median.
    slow = [0.1, 0.1, 0.1, 0.1, 9.6]
    fits = [[fit(*slow, exposed_seconds=2.0)], [fit(0.2, exposed_seconds=0.2)]]
    (result,) = summarize({"none": fits}, world_size=1)
    assert result.exposed_share == pytest.approx(1.0)
    fits = [[fit(*slow, exposed_seconds=1.0), fit(*slow, exposed_seconds=0.5)]]
    (result,) = summarize({"none": fits}, world_size=2)
    assert result.exposed_share == pytest.approx(0.375)


def test_without_ddp_there_are_times_and_no_ratios() -> None:
    (result,) = summarize({"ddp": [], "none": [[fit(0.3)]]}, world_size=2)
    assert result.speedup is None
    assert result.step_seconds == pytest.approx(0.3)
