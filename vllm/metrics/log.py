# SPDX-License-Identifier: Apache-2.0
"""Throughput in the log, every ten seconds while there is work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.metrics.stats import IterationStats

if TYPE_CHECKING:
    from vllm.engine.messages import SchedulerStats

logger = init_logger(__name__)

_INTERVAL_S = 10.0


class ThroughputLog:
    """Sums tokens and tells their rate."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._queries = 0
        self._hits = 0

    def update(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        """Take in one message from the core; log if it is time."""
        if iteration is not None:
            self._num_prompt_tokens += iteration.num_prompt_tokens
            self._num_generation_tokens += iteration.num_generation_tokens
        if scheduler is None:
            return
        self._queries += scheduler.prefix_cache_queries
        self._hits += scheduler.prefix_cache_hits
        now = time.monotonic()
        elapsed = now - self._since
        if elapsed >= _INTERVAL_S:
            if self._num_prompt_tokens or self._num_generation_tokens:
                self._log(scheduler, elapsed)
            self._since, self._num_prompt_tokens, self._num_generation_tokens = now, 0, 0

    def _log(self, scheduler: SchedulerStats, elapsed: float) -> None:
        logger.info(
            "Prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, "
            "KV cache %.1f %%, prefix cache hits %.1f %%",
            self._num_prompt_tokens / elapsed,
            self._num_generation_tokens / elapsed,
            scheduler.num_running,
            scheduler.num_waiting,
            100 * scheduler.kv_cache_usage,
            100 * self._hits / max(1, self._queries),
        )
