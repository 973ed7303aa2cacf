# SPDX-License-Identifier: Apache-2.0
"""Runs steps on one rank in this process, or on ranks elsewhere (`remote`)."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from vllm.config.kv_cache import KVCacheConfig
from vllm.engine.messages import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig


class StepHandle(abc.ABC):
    """A step that has been launched."""

    @abc.abstractmethod
    def result(self) -> ModelRunnerOutput:
        """Wait for the step."""


class Executor(abc.ABC):
    """What the engine core sees of the devices."""

    @staticmethod
    def create(vllm_config: VllmConfig) -> Executor:
        """The executor that the configuration asks for, its weights loaded."""
        parallel = vllm_config.parallel_config
        if parallel.distributed_executor_backend == "ray":
            from vllm.worker.ray_executor import RayExecutor

            return RayExecutor(vllm_config)
        if parallel.world_size == 1 and parallel.distributed_executor_backend != "mp":
            return InProcessExecutor(vllm_config)
        from vllm.worker.multiprocess import MultiprocessExecutor

        return MultiprocessExecutor(vllm_config)

    @abc.abstractmethod
    def kv_cache_memory_bytes(self) -> int:
        """Bytes that the KV cache may take on each rank, the weights being loaded."""

    @abc.abstractmethod
    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        """Allocate the cache."""

    @abc.abstractmethod
    def warm_up(self) -> None:
        """Run what requests can reach."""

    @abc.abstractmethod
    def execute_model(self, step: SchedulerOutput) -> StepHandle:
        """Launch a step."""

    def check_health(self) -> None:
        """Raise `EngineDeadError` if a rank is gone."""

    def shutdown(self) -> None:
        """Release devices and end workers."""


class InProcessExecutor(Executor):
    """One rank in this process."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        from vllm.worker.worker import Worker

        self._worker = Worker(vllm_config)

    def kv_cache_memory_bytes(self) -> int:
        return self._worker.kv_cache_memory_bytes()

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        self._worker.initialize_kv_cache(kv_config)

    def warm_up(self) -> None:
        self._worker.warm_up()

    def execute_model(self, step: SchedulerOutput) -> StepHandle:
        return self._worker.execute_model(step)  # type: ignore[return-value]
