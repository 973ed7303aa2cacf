# SPDX-License-Identifier: Apache-2.0
"""The exposition text: vLLM's names, and values that follow what happened."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.tiny_models import tiny_checkpoint
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.messages import SchedulerStats
from vllm.metrics.prometheus import PrometheusMetrics
from vllm.metrics.stats import FinishedRequestStats, IterationStats

NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions",
    "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success",
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds", "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
    "vllm:request_params_max_tokens", "vllm:request_params_n", "vllm:iteration_tokens_total",
    "vllm:cache_config_info", "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens_per_pos",
}  # fmt: skip


@pytest.fixture
def metrics() -> PrometheusMetrics:
    """Metrics of the tiny llama, called "m"."""
    args = EngineArgs(model=str(tiny_checkpoint("llama")), served_model_name=["m"])
    return PrometheusMetrics(args.create_engine_config())


def values(metrics: PrometheusMetrics) -> dict[str, float]:
    """Sample name (with what is not model or engine) to value."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + "".join(f" {v}" for v in labels.values())] = sample.value
    return found


def test_the_names_are_vllms(metrics: PrometheusMetrics) -> None:
    families = text_string_to_metric_families(metrics.render().decode())
    assert {f.name for f in families if not f.name.endswith("_created")} == NAMES


def test_a_step_moves_gauges_counters_and_histograms(metrics: PrometheusMetrics) -> None:
    stats = SchedulerStats(
        num_running=3,
        num_waiting=2,
        kv_cache_usage=0.25,
        prefix_cache_queries=100,
        prefix_cache_hits=64,
        num_preemptions=1,
        num_drafts=2,
        num_draft_tokens=4,
        num_accepted_tokens=3,
        accepted_per_position=[2, 1],
    )
    ended = FinishedRequestStats("stop", 10, 5, 0, 16, 1, 3.0, 0.5, 0.5, 2.0)
    for _ in range(2):
        metrics.update(stats, IterationStats(10, 7, [0.2], [0.01, 0.03], [ended]))
    got = values(metrics)
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 200,
        "vllm:prefix_cache_hits_total": 128,
        "vllm:num_preemptions_total": 2,
        "vllm:prompt_tokens_total": 20,
        "vllm:generation_tokens_total": 14,
        "vllm:request_success_total stop": 2,
        "vllm:request_success_total length": 0,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_sum": 0.08,
        "vllm:request_inference_time_seconds_sum": 5.0,
        "vllm:request_time_per_output_token_seconds_sum": 1.0,
        "vllm:spec_decode_num_accepted_tokens_total": 6,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total 1": 2,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)


def test_a_step_without_work_observes_nothing(metrics: PrometheusMetrics) -> None:
    metrics.update(SchedulerStats(), IterationStats())
    assert values(metrics)["vllm:iteration_tokens_total_count"] == 0
