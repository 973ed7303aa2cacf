# SPDX-License-Identifier: Apache-2.0
"""All checks in order, and the plan that comes out of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.config.gguf_header import read_gguf_header
from vllm.config.hub import download_weights
from vllm.config.kv_plan import full_sequence_bytes, groups_of
from vllm.errors import ConfigError, Diagnostic, ExitCode, worst_first
from vllm.models.layouts import expected_tensors, optional_tensors
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.gpus import known_gpu
from vllm.platforms.interface import Device
from vllm.preflight.environment import (
    check_chat_template,
    check_host,
    check_tokenizer,
    check_torch,
)
from vllm.preflight.files import compare_with_architecture, inspect_directory
from vllm.preflight.memory import (
    DeviceMemory,
    MemoryPlan,
    activation_bytes,
    check_concurrency,
    check_memory,
    expected_tensor_infos,
    longest_sequence,
    plan_memory,
    weight_bytes,
)
from vllm.preflight.report import Plan, PreflightReport
from vllm.preflight.safetensors_header import TensorInfo

if TYPE_CHECKING:
    from vllm.config.frontend import FrontendConfig
    from vllm.config.vllm import VllmConfig

_MAX_SHARDS = 64
"""Largest tensor-parallel size that a suggestion tries."""


def run(
    vllm_config: VllmConfig, frontend: FrontendConfig | None = None, serve: bool = False
) -> PreflightReport:
    """Everything that can be known before loading, worst first; reads headers only.

    With `serve` the host's limits and the chat template matter too.
    """
    findings = list(vllm_config.findings)
    shape_fits = not any(d.code in _SHAPE_CODES for d in findings)
    tensors = _check_weights(vllm_config, findings)
    _check_tokenizer(vllm_config, frontend, serve, findings)
    if frontend is not None:
        findings += frontend.check()
    if not vllm_config.device_config.planned_devices:
        ranks = vllm_config.parallel_config.world_size
        findings += check_host(ranks, vllm_config.scheduler_config.max_num_seqs if serve else 0)
        kind, platform = vllm_config.device_config.kind, vllm_config.device_config.platform
        findings += check_torch(kind, platform.driver_cuda_version())
    memory_plan = None
    if tensors is not None and shape_fits:
        memory_plan = _check_memory(vllm_config, tensors, findings)
    has_errors = any(d.severity == "error" for d in findings)
    plan = None if has_errors else _plan(vllm_config, memory_plan, tensors)
    return PreflightReport(tuple(worst_first(findings)), plan)


_SHAPE_CODES = ("tensor-parallel-size", "quantization-unsupported")


def _check_weights(
    config: VllmConfig, findings: list[Diagnostic]
) -> Mapping[str, TensorInfo] | None:
    """Tensors that will be loaded, by name; None where they cannot be told."""
    model, load_format = config.model_config, config.load_config.load_format
    architecture, hf_config = model.architecture, model.hf_config
    with_mtp = config.speculative_config is not None
    if load_format == "dummy":
        shapes = expected_tensors(hf_config, architecture, with_draft_head=with_mtp)
        return {t.name: t for t in expected_tensor_infos(shapes, model.dtype_bytes)}
    if model.is_gguf:
        return _gguf_tensors(model.model_path, findings)
    if load_format == "gguf":
        findings.append(_not_gguf(model.model_path))
        return None
    _fetch(config)
    inventory = inspect_directory(model.model_path)
    findings += inventory.findings
    if any(d.code == "quantization-unsupported" for d in config.findings):
        return None
    if not inventory.complete:
        return None
    expected = expected_tensors(hf_config, architecture, inventory.tensors, with_mtp)
    optional = optional_tensors(hf_config, architecture)
    findings += compare_with_architecture(inventory, expected, optional, architecture)
    return {n: t for n, t in inventory.tensors.items() if n in expected}


def _fetch(config: VllmConfig) -> None:
    """Weights of a hub id whose small files alone were needed until now."""
    model = config.model_config
    if os.path.isdir(os.path.expanduser(model.model)) or not model.model:
        return
    if not any(n.endswith(".safetensors") for n in os.listdir(model.model_path)):
        download_weights(model.model, model.revision, config.load_config.download_dir)


def _not_gguf(path: str) -> Diagnostic:
    return Diagnostic(
        "load-format",
        "--load-format gguf needs a GGUF file",
        why=f"{path} is a directory",
        fix="name the .gguf file, or leave --load-format out",
        exit_code=ExitCode.USAGE,
    )


def _gguf_tensors(path: str, findings: list[Diagnostic]) -> Mapping[str, TensorInfo] | None:
    try:
        header = read_gguf_header(path)
    except ConfigError as error:
        findings += error.findings
        return None
    return {
        name: TensorInfo(name, kind, shape, 0, os.path.basename(path))
        for name, (kind, shape) in header.tensors.items()
    }


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
