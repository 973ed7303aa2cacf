# SPDX-License-Identifier: Apache-2.0
"""Cores over the paged oracle that a test starts in a process of their own.

Module-level callables, because the core's process imports them by name. The
"configuration" is a dict.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from tests.engine.paged_oracle import FULL, SLIDING, PagedOracleExecutor
from vllm.config.kv_cache import KVCacheConfig
from vllm.engine.core import EngineCore
from vllm.engine.messages import SchedulerOutput
from vllm.engine.scheduler import Scheduler, SchedulerLimits
from vllm.errors import ConfigError, Diagnostic, EngineDeadError

GROUPS = (FULL, SLIDING)


class TroubledExecutor(PagedOracleExecutor):
    """Does to itself, at step `at`, what the configuration says."""

    def __init__(self, config: KVCacheConfig, options: dict[str, Any]) -> None:
        super().__init__(config)
        self._options = options

    def check_health(self) -> None:
        if self._options.get("how") == "lost worker":
            raise EngineDeadError("rank 1 was killed by SIGKILL")

    def execute_model(self, work: SchedulerOutput) -> Any:
        time.sleep(self._options.get("step_s", 0.0))
        if work.step >= self._options.get("at", 1 << 30):
            if self._options["how"] == "raise":
                raise RuntimeError("device fell off the bus\nsecond line")
            os.kill(os.getpid(), getattr(signal, self._options["how"]))
        for new in work.new_requests:
            if new.request_id.startswith("nan"):
                self.failing[new.request_id] = "logits are not finite"
        return super().execute_model(work)


def make_core(options: dict[str, Any]) -> EngineCore:
    """A core with a small cache and 64 tokens of context."""
    config = KVCacheConfig(8, GROUPS, (40, 40))
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64)
    return EngineCore(Scheduler(limits, config, True), TroubledExecutor(config, options))


def fail_with_a_finding(options: dict[str, Any]) -> EngineCore:
    """What a configuration does that only the core can judge."""
    raise ConfigError(Diagnostic("kv-cache-too-small", "no room", fix="--max-model-len 10"))


def fail_with_a_defect(options: dict[str, Any]) -> EngineCore:
    """What a bug of ours does."""
    raise KeyError("layers.3")


def die_while_loading(options: dict[str, Any]) -> EngineCore:
    """What the kernel does to a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def load_for_ever(options: dict[str, Any]) -> EngineCore:
    """A core that is still loading."""
    time.sleep(600)
    raise AssertionError
