# SPDX-License-Identifier: Apache-2.0
"""All settings of an engine, checked against each other and against the devices."""

from __future__ import annotations

import dataclasses

from vllm import envs
from vllm.config.attention import AttentionConfig
from vllm.config.cache import CacheConfig
from vllm.config.compilation import CompilationConfig
from vllm.config.device import DeviceConfig
from vllm.config.load import LoadConfig
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.errors import Diagnostic, ExitCode, VLLMError, error_from
from vllm.logger import init_logger
from vllm.platforms import host
from vllm.platforms.attention import (
    BACKENDS,
    AttentionBackend,
    AttentionNeeds,
    select_attention_backend,
)

logger = init_logger(__name__)

MAX_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192, "rocm": 8192}


@dataclasses.dataclass
class VllmConfig:
    """What an engine is built from.

    `findings` are the warnings, and with `defer` the errors, of the parts and of their
    combination; without `defer` errors raise.
    """

    model_config: ModelConfig
    cache_config: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    load_config: LoadConfig = dataclasses.field(default_factory=LoadConfig)
    device_config: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
    attention_config: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    compilation_config: CompilationConfig = dataclasses.field(default_factory=CompilationConfig)
    speculative_config: SpeculativeConfig | None = None
    structured_outputs_config: StructuredOutputsConfig = dataclasses.field(
        default_factory=StructuredOutputsConfig
    )
    findings: list[Diagnostic] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        kind, shape = self.device_config.kind, self.model_config.shape
        scheduler, architecture = self.scheduler_config, self.model_config.architecture
        if scheduler.max_num_batched_tokens is None:
            default = max(MAX_BATCHED_TOKENS[kind], scheduler.max_num_seqs)
            length = 0 if scheduler.enable_chunked_prefill else self.model_config.max_model_len
            scheduler.max_num_batched_tokens = max(default, length or 0)
        if scheduler.async_scheduling is None:
            scheduler.async_scheduling = kind != "cpu"
        self.findings += self.parallel_config.check_shape(shape, architecture)
        self.findings += self._check_devices()
        if self.speculative_config is not None:
            self.findings += self.speculative_config.check_model(shape, architecture)
        self.findings += scheduler.check_lengths(self.model_config.max_model_len or 0)
        self.findings += self._resolve_attention()

    def raise_for_errors(self) -> None:
        """Raise the `VLLMError` of the worst finding, carrying all; or return."""
        if any(d.severity == "error" for d in self.findings):
            raise error_from(self.findings)

    @property
    def backend(self) -> AttentionBackend:
        """The chosen attention backend's declared facts."""
        return BACKENDS[self.attention_config.resolved_backend]

    @property
    def block_size(self) -> int:
        """Tokens in a block of the KV cache."""
        return self.cache_config.block_size or self.backend.block_size

    def _check_devices(self) -> list[Diagnostic]:
        """More ranks than devices; a device list that cannot be told is left to the workers."""
        device, ranks = self.device_config, self.parallel_config.world_size
        if self.parallel_config.distributed_executor_backend == "ray":
            ranks = 1  # the others may be on other nodes, which only the executor knows
        if device.kind == "cpu":
            cores = max(MIN_CPU_RANKS, host.num_cores())
            why = f"no GPU is used, and the {host.num_cores()} cores serve at most {cores} ranks"
            too_many = [_too_many_ranks(ranks, cores, why)] if ranks > cores else []
            return too_many + _check_binding(ranks)
        if device.platform.problem():
            logger.info("Devices cannot be told: %s", device.platform.problem())
            return []
        count = len(device.devices)
        if count == 0:
            return [_none_visible(device)]
        return [_too_many_ranks(ranks, count, _why_visible(device))] if ranks > count else []

    def _resolve_attention(self) -> list[Diagnostic]:
        model_config, attention = self.model_config, self.attention_config
        layers = model_config.shape.layers
        needs = AttentionNeeds(
            frozenset(layer.head_dim for layer in layers),
            model_config.resolved_dtype,
            any(layer.rel_extent for layer in layers),
        )
        devices = self.device_config.devices[: self.parallel_config.world_size]
        kind = self.device_config.kind
        try:
            chosen = select_attention_backend(kind, devices, needs, attention.backend)
        except VLLMError as error:
            attention.resolved_backend = {"cpu": "CPU_ATTN"}.get(kind, "TRITON_ATTN")
            return list(error.findings)
        attention.resolved_backend = chosen.backend.name
        attention.rejected = chosen.rejected
        reasons = "; ".join(f"{name}: {why}" for name, why in chosen.rejected.items())
        logger.info("Attention backend: %s (%s)", chosen.backend.name, reasons)
        return self._check_block_size(chosen.backend)

    def _check_block_size(self, backend: AttentionBackend) -> list[Diagnostic]:
        size = self.cache_config.block_size
        if size is None or size in backend.block_sizes:
            return []
        sizes = ", ".join(map(str, backend.block_sizes))
        return [
            Diagnostic(
                "block-size",
                f"--block-size {size} does not work with {backend.name}",
                why=f"its kernels take {sizes}",
                fix=f"--block-size {backend.block_size}, or leave it out",
                exit_code=ExitCode.USAGE,
            )
        ]


MIN_CPU_RANKS = 4
"""Ranks that may share fewer cores: slow, but right, and what tests of sharding need."""


def _check_binding(ranks: int) -> list[Diagnostic]:
    """VLLM_CPU_OMP_THREADS_BIND against the ranks and the cores that there are."""
    bound = envs.VLLM_CPU_OMP_THREADS_BIND
    if bound is None:
        return []
    usable = host.usable_cores()
    foreign = sorted({core for cores in bound for core in cores} - usable)
    if foreign:
        what = f"names core {foreign[0]}"
        why = f"this process may use {', '.join(map(str, sorted(usable)))}"
    elif len(bound) < ranks:
        what, why = f"names cores for {len(bound)} of {ranks} ranks", "every rank needs some"
    else:
        return []
    return [
        Diagnostic(
            "invalid-environment",
            f"VLLM_CPU_OMP_THREADS_BIND {what}",
            why=why,
            fix="name the cores of every rank, as in 0-3|4-7, or unset it",
            exit_code=ExitCode.USAGE,
        )
    ]


def _too_many_ranks(ranks: int, count: int, why: str) -> Diagnostic:
    return Diagnostic(
        "too-few-devices",
        f"{ranks} ranks want {ranks} devices, {count} {'is' if count == 1 else 'are'} visible",
        why=why,
        where="--tensor-parallel-size times --pipeline-parallel-size",
        fix=f"--tensor-parallel-size {count}",
        exit_code=ExitCode.HARDWARE,
    )


def _why_visible(device: DeviceConfig) -> str:
    import os

    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = getattr(device.platform, "num_present", device.platform.device_count)()
    if device.planned_devices:
        return "--device names that many"
    if value is not None:
        return f"CUDA_VISIBLE_DEVICES={value!r} chooses from {present} present"
    return f"the machine has {present}"


def _none_visible(device: DeviceConfig) -> Diagnostic:
    return Diagnostic(
        "no-visible-device",
        "no GPU is visible",
        why=_why_visible(device),
        fix="unset CUDA_VISIBLE_DEVICES or correct it, or --device cpu",
        exit_code=ExitCode.HARDWARE,
    )
