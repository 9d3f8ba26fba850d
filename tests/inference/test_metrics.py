"""Reading engines' /metrics pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.inference import EngineMetrics, parse_metrics

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 7.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:num_preemptions_total{engine="0",model_name="tiny"} 2.0
vllm:num_preemptions_created{engine="0",model_name="tiny"} 1.7947968217426708e+09
vllm:generation_tokens_total{engine="0",model_name="tiny"} 1.5e+03
process_start_time_seconds 1.79479677168e+09
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m",tp_rank="0"} 5.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 1.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.5
sglang:num_retracted_reqs{model_name="m"} 9.0
sglang:num_retracted_requests_total{model_name="m"} 4.0
sglang:generation_tokens_total{model_name="m"} 12.0
"""


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (VLLM, EngineMetrics(running=7, waiting=3, cache_usage=0.25, preemptions=2, generated_tokens=1500)),
        (SGLANG, EngineMetrics(running=5, waiting=1, cache_usage=0.5, preemptions=4, generated_tokens=12)),
    ],
    ids=["vllm", "sglang"],
)
def test_both_engines_pages_are_read_into_one_shape(page: str, expected: EngineMetrics) -> None:
    """Names differ between engines; what they mean does not."""
    assert parse_metrics(page) == expected


def test_several_engines_behind_one_server_are_summed_and_the_fullest_cache_counts() -> None:
    """With data parallelism a page has one sample per engine."""
    page = VLLM + VLLM.replace('engine="0"', 'engine="1"').replace("0.25", "0.75")
    assert parse_metrics(page) == EngineMetrics(
        running=14, waiting=6, cache_usage=0.75, preemptions=4, generated_tokens=3000
    )


def test_a_page_without_queue_gauges_is_no_reading() -> None:
    """A server that is no known engine says nothing about its queue, which is not the same as an empty one."""
    assert parse_metrics("http_requests_total 4\n") is None


def test_a_label_with_braces_and_spaces_does_not_hide_the_value() -> None:
    """Label values may hold any text."""
    reading = parse_metrics('vllm:num_requests_running{model_name="a {b} c"} 3.0 1700000000\n')
    assert reading is not None
    assert reading.running == 3


@given(
    st.lists(st.sampled_from([*VLLM.splitlines(), "vllm:num_requests_running", "vllm:{", "vllm:x NaN", "}{"]))
)
def test_no_page_makes_reading_fail(lines: list[str]) -> None:
    """A torn or odd page gives a reading or none, never an exception."""
    parse_metrics("\n".join(lines))


@given(st.text())
def test_arbitrary_text_is_read_without_failing(text: str) -> None:
    """Whatever a server sends for /metrics is survived."""
    parse_metrics("vllm:num_requests_running " + text)
