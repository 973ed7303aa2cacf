# SPDX-License-Identifier: Apache-2.0
"""All checks in order, and the plan that comes out of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm.config.kv_plan import full_sequence_bytes, groups_of
from vllm.errors import ConfigError, Diagnostic, worst_first
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.gpus import known_gpu
from vllm.platforms.interface import Device
from vllm.preflight.environment import (
    check_chat_template,
    check_host,
    check_tokenizer,
    check_torch,
)
from vllm.preflight.memory import (
    DeviceMemory,
    MemoryPlan,
    activation_bytes,
    check_concurrency,
    check_memory,
    longest_sequence,
    plan_memory,
    weight_bytes,
)
from vllm.preflight.report import Plan, PreflightReport
from vllm.preflight.safetensors_header import TensorInfo
from vllm.preflight.weights import (
    architecture_tensors,
    check_weights,
    fetch,
    is_on_hub,
    not_cached,
)

if TYPE_CHECKING:
    from vllm.config.frontend import FrontendConfig
    from vllm.config.vllm import VllmConfig

_MAX_SHARDS = 64
"""Largest tensor-parallel size that a suggestion tries."""


def run(
    vllm_config: VllmConfig,
    frontend: FrontendConfig | None = None,
    serve: bool = False,
    found: Iterable[Diagnostic] = (),
    download: bool = True,
) -> PreflightReport:
    """Everything that can be known before loading, worst first; reads headers only.

    With `serve` the host's limits and the chat template matter too; `found` is what the caller
    knows already. Weights of a hub id that are not cached are fetched when nothing else speaks
    against it; without `download` they are not, and the plan is that of the architecture.
    """
    findings = [*vllm_config.findings, *found]
    on_hub = is_on_hub(vllm_config)
    tensors = architecture_tensors(vllm_config) if on_hub else check_weights(vllm_config, findings)
    _check_tokenizer(vllm_config, frontend, serve, findings)
    if frontend is not None:
        findings += frontend.check()
    if not vllm_config.device_config.planned_devices:
        ranks = vllm_config.parallel_config.world_size
        findings += check_host(ranks, vllm_config.scheduler_config.max_num_seqs if serve else 0)
        kind, platform = vllm_config.device_config.kind, vllm_config.device_config.platform
        findings += check_torch(kind, platform.driver_cuda_version())
    memory_plan = None
    if tensors is not None and not any(d.code in _SHAPE_CODES for d in findings):
        memory_plan = _check_memory(vllm_config, tensors, findings)
    if on_hub and not _has_errors(findings):
        findings += fetch(vllm_config) if download else [not_cached(vllm_config)]
    plan = None if _has_errors(findings) else _plan(vllm_config, memory_plan, tensors)
    return PreflightReport(tuple(worst_first(findings)), plan)


def _has_errors(findings: Iterable[Diagnostic]) -> bool:
    return any(d.severity == "error" for d in findings)


_SHAPE_CODES = ("tensor-parallel-size", "quantization-unsupported")


def _check_tokenizer(
    config: VllmConfig, frontend: FrontendConfig | None, serve: bool, findings: list[Diagnostic]
) -> None:
    model = config.model_config
    if model.skip_tokenizer_init:
        return
    try:
        path = model.tokenizer_path
    except ConfigError as error:
        findings += error.findings
        return
    if path.endswith(".gguf"):
        return
    found = check_tokenizer(path, model.shape.vocab_size)
    if model.trust_remote_code:
        found = [d for d in found if d.code != "tokenizer-remote-code"]
    findings += found
    if serve and not model.uses_inkling_renderer:
        findings += check_chat_template(path, frontend.chat_template if frontend else None)


def _check_memory(
    config: VllmConfig, tensors: Mapping[str, TensorInfo], findings: list[Diagnostic]
) -> MemoryPlan | None:
    """The plan of the rank with the least memory; None where no device tells its memory."""
    ranks = config.parallel_config.world_size
    on_host = config.device_config.kind == "cpu"
    memories = [
        (memory, device)
        for device in config.device_config.devices[:ranks]
        if (memory := _device_memory(config, device, ranks if on_host else 1)) is not None
    ]
    if not memories:
        return None
    memory, device = min(memories, key=lambda item: item[0].budget)
    tp = config.parallel_config.tensor_parallel_size
    plan = _memory_plan(config, tensors, memory, tp)
    scheduler, model = config.scheduler_config, config.model_config
    assert scheduler.max_num_batched_tokens is not None and model.max_model_len is not None
    groups, block_size = groups_of(config), config.block_size
    longest = longest_sequence(
        groups,
        block_size,
        scheduler.max_num_batched_tokens,
        model.max_model_len,
        memory.budget - plan.weight_bytes - plan.activation_bytes,
    )
    found = check_memory(
        plan,
        memory,
        "host memory" if on_host else f"GPU {device.index}",
        longest,
        model.max_model_len,
        tp,
        _smallest_tp(config, tensors, memory),
    )
    if not found and (on_host or config.cache_config.kv_cache_memory_bytes is not None):
        found = _check_cache_limit(config, plan)
    findings += found or check_concurrency(plan, scheduler.max_num_seqs, block_size)
    return plan


def _check_cache_limit(config: VllmConfig, plan: MemoryPlan) -> list[Diagnostic]:
    """A cache whose size is given, not what is left over, must hold one whole sequence."""
    model, scheduler = config.model_config, config.scheduler_config
    assert scheduler.max_num_batched_tokens is not None and model.max_model_len is not None
    needed = full_sequence_bytes(config)
    if plan.kv_bytes >= needed:
        return []
    longest = longest_sequence(
        groups_of(config),
        config.block_size,
        scheduler.max_num_batched_tokens,
        model.max_model_len,
        plan.kv_bytes - (needed - plan.sequence_bytes),
    )
    flag = "--kv-cache-memory-bytes"
    if config.cache_config.kv_cache_memory_bytes is None:
        flag = "VLLM_CPU_KVCACHE_SPACE (GiB)"
    gib = 1 << 30
    return [
        Diagnostic(
            "memory-kv-cache",
            f"the KV cache cannot hold one sequence of {model.max_model_len:,} tokens: it takes "
            f"{needed / gib:.2f} GiB, the cache has {plan.kv_bytes / gib:.2f} GiB",
            fix=f"--max-model-len {longest}, or more for {flag}",
        )
    ]


def _memory_plan(
    config: VllmConfig, tensors: Mapping[str, TensorInfo], memory: DeviceMemory, tp: int
) -> MemoryPlan:
    model, scheduler = config.model_config, config.scheduler_config
    assert scheduler.max_num_batched_tokens is not None and model.max_model_len is not None
    weights = weight_bytes(tensors.values(), model.dtype_bytes, tp)
    activations = activation_bytes(
        model.shape, model.dtype_bytes, tp, scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    )
    left = memory.budget - weights[1] - activations
    if config.cache_config.kv_cache_memory_bytes is not None:
        kv_budget = config.cache_config.kv_cache_memory_bytes
    elif config.device_config.kind == "cpu":
        sequence = full_sequence_bytes(config)
        kv_budget = min(left, CpuPlatform.kv_cache_bytes(max(0, left), sequence))
    else:
        kv_budget = left
    return plan_memory(
        weights,
        activations,
        groups_of(config),
        config.block_size,
        model.max_model_len,
        scheduler.max_num_batched_tokens,
        kv_budget,
    )


def _device_memory(config: VllmConfig, device: Device, ranks: int) -> DeviceMemory | None:
    if device.memory_total is None:
        return None
    free = device.memory_total if device.memory_free is None else device.memory_free
    total, free = device.memory_total // ranks, free // ranks
    budget = free
    if config.device_config.kind != "cpu":
        budget = min(int(total * config.cache_config.gpu_memory_utilization), free)
    return DeviceMemory(device.name, total, free, budget, device.is_unified)


def _smallest_tp(
    config: VllmConfig, tensors: Mapping[str, TensorInfo], memory: DeviceMemory
) -> int | None:
    """Least tensor-parallel size at which the weights would fit on such devices."""
    if config.device_config.kind == "cpu":
        return None
    shape, parallel = config.model_config.shape, config.parallel_config
    size = parallel.tensor_parallel_size * 2
    while size <= _MAX_SHARDS:
        lower, _ = weight_bytes(tensors.values(), config.model_config.dtype_bytes, size)
        if lower <= memory.budget and parallel.fits(shape, size):
            return size
        size *= 2
    return None


def _plan(
    config: VllmConfig,
    memory: MemoryPlan | None,
    tensors: Mapping[str, TensorInfo] | None,
) -> Plan:
    model, device = config.model_config, config.device_config
    ranks = config.parallel_config.world_size
    devices = device.devices[:ranks]
    first = devices[0] if devices else None
    budget = _device_memory(config, first, 1) if first else None
    kinds = dict.fromkeys(layer.attention for layer in model.shape.layers)
    backend = config.attention_config.resolved_backend
    assert model.max_model_len is not None
    return Plan(
        model=model.served_names[0],
        architecture=model.architecture,
        platform=device.kind,
        devices=tuple(d.name for d in devices),
        dtype=model.resolved_dtype,
        quantization=model.quantization,
        tensor_parallel_size=config.parallel_config.tensor_parallel_size,
        attention_backends=dict.fromkeys(kinds, backend),
        weight_bytes=memory.weight_bytes if memory else None,
        activation_bytes=memory.activation_bytes if memory else None,
        kv_bytes=memory.kv_bytes if memory else None,
        kv_bytes_per_token=memory.kv_bytes_per_token if memory else None,
        kv_tokens=memory.kv_tokens if memory else None,
        full_sequences=memory.full_sequences if memory else None,
        max_model_len=model.max_model_len,
        memory_total=budget.total if budget else None,
        memory_budget=budget.budget if budget else None,
        decode_ceiling_tokens_per_s=_decode_ceiling(config, first, tensors),
    )


def _decode_ceiling(
    config: VllmConfig, device: Device | None, tensors: Mapping[str, TensorInfo] | None
) -> float | None:
    """Bandwidth over the weights that one token reads: all but the embedding's other rows, and
    of the experts those that are chosen."""
    gpu = known_gpu(device.name) if device else None
    if gpu is None or tensors is None:
        return None
    model, tp = config.model_config, config.parallel_config.tensor_parallel_size
    shape = model.shape
    read = 0.0
    for info in tensors.values():
        size = weight_bytes([info], model.dtype_bytes, tp)[1]
        if info.name.endswith(("embed_tokens.weight", "llm.embed.weight", "token_embd.weight")):
            size = size if shape.tie_word_embeddings else 0
        elif ".experts." in info.name or "_exps." in info.name:
            size = size * shape.num_experts_per_tok // max(1, shape.num_experts)
        read += size
    return gpu.bandwidth * 1e9 / read if read else None
