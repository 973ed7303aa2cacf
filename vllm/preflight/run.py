# SPDX-License-Identifier: Apache-2.0
"""All checks in order, and the plan that comes out of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm.errors import ConfigError, Diagnostic, worst_first
from vllm.platforms.gpus import known_gpu
from vllm.platforms.interface import Device
from vllm.preflight.environment import (
    check_chat_template,
    check_gguf_template,
    check_gguf_tokenizer,
    check_host,
    check_tokenizer,
    check_torch,
)
from vllm.preflight.fit import check_fit, device_memory
from vllm.preflight.memory import MemoryPlan, weight_bytes
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
        memory_plan = check_fit(vllm_config, tensors, findings)
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
    given = frontend.chat_template if frontend else None
    if path.endswith(".gguf"):
        findings += check_gguf_tokenizer(path, model.shape.vocab_size)
        if serve:
            findings += check_gguf_template(path, given)
        return
    found = check_tokenizer(path, model.shape.vocab_size, model.tokenizer_mode == "inkling")
    if model.trust_remote_code:
        found = [d for d in found if d.code != "tokenizer-remote-code"]
    findings += found
    if serve and not model.uses_inkling_renderer:
        findings += check_chat_template(path, given)


def _plan(
    config: VllmConfig,
    memory: MemoryPlan | None,
    tensors: Mapping[str, TensorInfo] | None,
) -> Plan:
    model, device = config.model_config, config.device_config
    ranks = config.parallel_config.world_size
    devices = device.devices[:ranks]
    first = devices[0] if devices else None
    budget = device_memory(config, first, 1) if first else None
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
