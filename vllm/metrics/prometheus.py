# SPDX-License-Identifier: Apache-2.0
"""The metrics of /metrics, under the names and labels that vLLM's dashboards know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from vllm.metrics.stats import FinishedRequestStats, IterationStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.messages import SchedulerStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
_LABELS = ["model_name", "engine"]
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def _counts(largest: int) -> list[float]:
    """1, 2, 5, 10, ... up to `largest`."""
    steps = [m * 10**e for e in range(12) for m in (1, 2, 5)]
    return [float(step) for step in steps if step <= largest]


class PrometheusMetrics:
    """All metrics of one server; `update` takes what a step brought."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._labels = (vllm_config.model_config.served_names[0], "0")
        self._make_gauges()
        self._make_counters()
        self._make_histograms(vllm_config.model_config.max_model_len or 1)
        self._make_request_counters()
        cache = vllm_config.cache_config
        facts = {
            "block_size": str(vllm_config.block_size),
            "cache_dtype": cache.cache_dtype,
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "engine": "0",
        }
        info = Gauge(
            "vllm:cache_config_info", "Settings of the cache", facts, registry=self.registry
        )
        info.labels(**facts).set(1)

    def render(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, doc: str) -> Any:
        return Gauge(name, doc, _LABELS, registry=self.registry).labels(*self._labels)

    def _counter(self, name: str, doc: str) -> Any:
        return Counter(name, doc, _LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, doc: str, buckets: Any) -> Any:
        metric = Histogram(name, doc, _LABELS, buckets=buckets, registry=self.registry)
        return metric.labels(*self._labels)

    def _make_gauges(self) -> None:
        self._running = self._gauge("vllm:num_requests_running", "Sequences in the batch")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Sequences that wait")
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1")

    def _make_counters(self) -> None:
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache")
        self._preemptions = self._counter("vllm:num_preemptions", "Sequences sent back to wait")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed")
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Drafts made")
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted")
        self._accepted = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted"
        )
        self._accepted_per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted at a position",
            [*_LABELS, "position"],
            registry=self.registry,
        )

    def _make_request_counters(self) -> None:
        self._success = Counter(
            "vllm:request_success",
            "Sequences ended, by reason",
            [*_LABELS, "finished_reason"],
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(*self._labels, reason)

    def _make_histograms(self, max_model_len: int) -> None:
        counts = _counts(max_model_len)
        make = self._histogram
        self._first_token = make(
            "vllm:time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN_S
        )
        self._inter_token = make(
            "vllm:inter_token_latency_seconds", "Between two tokens of a sequence", _TOKEN_S
        )
        self._per_token = make(
            "vllm:request_time_per_output_token_seconds", "Mean of a sequence", _TOKEN_S
        )
        self._e2e = make("vllm:e2e_request_latency_seconds", "From arrival to the end", _REQUEST_S)
        self._queued = make("vllm:request_queue_time_seconds", "Time waiting", _REQUEST_S)
        self._inference = make("vllm:request_inference_time_seconds", "Time running", _REQUEST_S)
        self._prefill = make("vllm:request_prefill_time_seconds", "Time in prefill", _REQUEST_S)
        self._decode = make("vllm:request_decode_time_seconds", "Time in decode", _REQUEST_S)
        self._prompt_len = make("vllm:request_prompt_tokens", "Prompt tokens", counts)
        self._output_len = make("vllm:request_generation_tokens", "Tokens generated", counts)
        self._params_max = make("vllm:request_params_max_tokens", "max_tokens asked for", counts)
        self._params_n = make("vllm:request_params_n", "n asked for", (1, 2, 5, 10, 20))
        self._iteration = make("vllm:iteration_tokens_total", "Tokens of a step", _ITERATION_TOKENS)

    def update(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        """Take in one message from the core."""
        if scheduler is not None:
            self._update_scheduler(scheduler)
        if iteration is None or not (iteration.num_generation_tokens or iteration.finished):
            return
        self._prompt_tokens.inc(iteration.num_prompt_tokens)
        self._generated.inc(iteration.num_generation_tokens)
        self._iteration.observe(iteration.num_prompt_tokens + iteration.num_generation_tokens)
        for value in iteration.times_to_first_token_s:
            self._first_token.observe(value)
        for value in iteration.inter_token_latencies_s:
            self._inter_token.observe(value)
        for finished in iteration.finished:
            self._update_finished(finished)

    def _update_scheduler(self, stats: SchedulerStats) -> None:
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._usage.set(stats.kv_cache_usage)
        self._queries.inc(stats.prefix_cache_queries)
        self._hits.inc(stats.prefix_cache_hits)
        self._preemptions.inc(stats.num_preemptions)
        if stats.num_drafts:
            self._drafts.inc(stats.num_drafts)
            self._draft_tokens.inc(stats.num_draft_tokens)
            self._accepted.inc(stats.num_accepted_tokens)
            for position, count in enumerate(stats.accepted_per_position):
                self._accepted_per_position.labels(*self._labels, str(position)).inc(count)

    def _update_finished(self, stats: FinishedRequestStats) -> None:
        self._success.labels(*self._labels, stats.finish_reason).inc()
        self._e2e.observe(stats.e2e_s)
        self._queued.observe(stats.queued_s)
        self._inference.observe(stats.inference_s)
        self._prefill.observe(stats.prefill_s)
        self._decode.observe(stats.decode_s)
        self._prompt_len.observe(stats.num_prompt_tokens)
        self._output_len.observe(stats.num_generation_tokens)
        self._params_n.observe(stats.n)
        if stats.max_tokens is not None:
            self._params_max.observe(stats.max_tokens)
        if stats.time_per_output_token_s is not None:
            self._per_token.observe(stats.time_per_output_token_s)
