# SPDX-License-Identifier: Apache-2.0
"""What the engine's own Python costs a step: scheduler and update, without a model.

    python benchmarks/scheduler_overhead.py [--num-seqs 64] [--steps 2000]

Prints microseconds a step, the median and the 90th percentile, with the executor
replaced by one that returns constant tokens. With --profile prints where they go.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time

from vllm.config.kv_cache import KVCacheConfig, KVCacheGroup, LayerCacheSpec
from vllm.engine.core import EngineCore
from vllm.engine.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from vllm.engine.scheduler import Scheduler, SchedulerLimits
from vllm.sampling_params import SamplingParams


class Result:
    """A step that is done."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        """The tokens."""
        return self._output


class ConstantExecutor:
    """Answers every request that has its prompt with token 7."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def execute_model(self, work: SchedulerOutput) -> Result:
        """Answer at once."""
        for new in work.new_requests:
            self._left[new.request_id] = len(new.token_ids) - new.num_computed_tokens
        sampled = []
        for request_id, count in work.num_scheduled_tokens.items():
            self._left[request_id] -= count
            sampled.append([7] if self._left[request_id] <= 0 else [])
        return Result(ModelRunnerOutput(list(work.num_scheduled_tokens), sampled))

    def check_health(self) -> None:
        """Nothing can be gone."""

    def shutdown(self) -> None:
        """Nothing to release."""


def measure(num_seqs: int, steps: int, async_scheduling: bool, profile: bool) -> None:
    """Run `num_seqs` requests for `steps` decode steps and print the time of each."""
    layer = (LayerCacheSpec("layer", 2, num_kv_heads=1, head_dim=1),)
    config = KVCacheConfig(16, (KVCacheGroup("full", layer),), (num_seqs * (steps // 16 + 12),))
    limits = SchedulerLimits(num_seqs, 8192, steps + 200)
    executor = ConstantExecutor()
    core = EngineCore(Scheduler(limits, config, True), executor, async_scheduling=async_scheduling)
    for index in range(num_seqs):
        params = SamplingParams(temperature=0, max_tokens=steps, eos_token_ids=[0])
        prompt = [index + 1] * 128
        core.add_request(EngineCoreRequest(f"request-{index}", prompt, params, 0.0))
    core.step()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    times = []
    for _ in range(steps - 2):
        start = time.perf_counter()
        core.step()
        times.append((time.perf_counter() - start) * 1e6)
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(12)
    times.sort()
    name = "async" if async_scheduling else "sync"
    print(
        f"{num_seqs} sequences, {name}: median {statistics.median(times):.0f} us, "
        f"p90 {times[int(len(times) * 0.9)]:.0f} us a step"
    )


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    for num_seqs in args.num_seqs:
        for async_scheduling in (False, True):
            measure(num_seqs, args.steps, async_scheduling, args.profile)


if __name__ == "__main__":
    main()
