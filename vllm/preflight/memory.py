# SPDX-License-Identifier: Apache-2.0
"""Does it fit? Weights, KV cache and activations against each device's memory, unloaded.

Every figure has a lower bound that loading can only exceed and an estimate. A plan is
refused only where the lower bound is above all that the device could give; between the
two it is a warning, since a wrong refusal is worse than a late one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from vllm.config.kv_cache import KVCacheGroup, sequence_bytes
from vllm.config.shape import ModelShape
from vllm.errors import Diagnostic, ExitCode
from vllm.preflight.safetensors_header import TensorInfo

GiB = 1 << 30
_SCALE_SUFFIXES = (
    "_scale", "_scale_2", "_scale_inv", "_zero_point", ".scale", ".scale2", ".input_amax",
    ".original_shape",
)  # fmt: skip
"""Companions of quantised tensors that dequantisation on load consumes."""


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What one rank may use, in bytes."""

    name: str
    total: int
    free: int
    budget: int
    """Upper bound of what the engine may take: the utilisation share, and no more than is free."""
    unified: bool = False
    """Host and device share it; `free` is then the system's figure."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank and what they allow."""

    weight_bytes: int
    weight_bytes_lower: int
    activation_bytes: int
    kv_bytes_per_token: int
    """Growth per token of a long sequence: the full-attention groups."""
    sequence_bytes: int
    """One sequence of max_model_len."""
    kv_bytes: int
    kv_tokens: int
    full_sequences: float
    """Sequences of max_model_len that fit at once."""


def loaded_bytes(info: TensorInfo, dtype_bytes: int) -> int:
    """Bytes that a stored tensor takes once loaded in a `dtype_bytes` wide model dtype.

    Floating and quantised values become the model's dtype; two 4-bit values share a
    stored U8, and the scales of quantised tensors do not outlive the load.
    """
    if info.name.endswith(_SCALE_SUFFIXES):
        return 0
    if info.dtype in ("U8", "F4"):
        return info.num_elements * (2 if info.dtype == "U8" else 1) * dtype_bytes
    if info.dtype.startswith(("I", "U")) or info.dtype == "BOOL":
        return info.num_bytes
    return info.num_elements * dtype_bytes


def weight_bytes(tensors: Iterable[TensorInfo], dtype_bytes: int, tp: int) -> tuple[int, int]:
    """(lower bound, estimate) of one rank's weights.

    Matrices are sharded over `tp` ranks, vectors (norms, biases) kept whole; the lower
    bound takes everything as sharded.
    """
    total = estimate = 0
    for info in tensors:
        size = loaded_bytes(info, dtype_bytes)
        total += size
        estimate += size if len(info.shape) < 2 else math.ceil(size / tp)
    return total // tp, estimate


def expected_tensor_infos(
    shapes: Mapping[str, tuple[int, ...]], dtype_bytes: int
) -> list[TensorInfo]:
    """The tensors that random weights (--load-format dummy) will take, as if from headers."""
    name = {2: "BF16", 4: "F32"}[dtype_bytes]
    return [
        TensorInfo(n, name, tuple(s), math.prod(s) * dtype_bytes, "") for n, s in shapes.items()
    ]


def activation_bytes(
    shape: ModelShape, dtype_bytes: int, tp: int, batched_tokens: int, seqs: int
) -> int:
    """Estimate of a step's peak: the widest layer's inputs and outputs, and float32 logits."""
    heads = max((layer.num_heads * layer.head_dim for layer in shape.layers), default=0)
    widest = max(2 * shape.intermediate_size, 3 * heads, 2 * shape.moe_intermediate_size
                 * max(1, shape.num_experts_per_tok)) // tp  # fmt: skip
    per_token = (4 * shape.hidden_size + 2 * widest) * dtype_bytes
    return batched_tokens * per_token + seqs * shape.vocab_size * 4


def plan_memory(
    weights: tuple[int, int],
    activations: int,
    groups: tuple[KVCacheGroup, ...],
    block_size: int,
    max_model_len: int,
    chunk: int,
    kv_budget: int,
) -> MemoryPlan:
    """Join the parts; `kv_budget` is what the cache gets on one rank (may be negative)."""
    sequence = sequence_bytes(groups, block_size, max_model_len, chunk)
    per_token = sum(g.block_bytes(block_size) / block_size for g in groups if g.window is None)
    kv_bytes = max(0, kv_budget)
    full = kv_bytes / sequence if sequence else 0.0
    tokens = int(full * max_model_len)
    return MemoryPlan(
        weight_bytes=weights[1],
        weight_bytes_lower=weights[0],
        activation_bytes=activations,
        kv_bytes_per_token=math.ceil(per_token),
        sequence_bytes=sequence,
        kv_bytes=kv_bytes,
        kv_tokens=tokens,
        full_sequences=full,
    )


def longest_sequence(
    groups: tuple[KVCacheGroup, ...], block_size: int, chunk: int, limit: int, budget: int
) -> int:
    """Most tokens (a multiple of the block size, at most `limit`) whose cache fits `budget`."""
    low, high = 0, limit // block_size
    while low < high:
        middle = (low + high + 1) // 2
        if sequence_bytes(groups, block_size, middle * block_size, chunk) <= budget:
            low = middle
        else:
            high = middle - 1
    return low * block_size


def check_memory(
    plan: MemoryPlan,
    memory: DeviceMemory,
    where: str,
    longest: int,
    max_model_len: int,
    tp: int,
    smallest_tp: int | None,
) -> list[Diagnostic]:
    """Findings for one rank's device; `longest` as `longest_sequence` gives it."""
    lower, budget = plan.weight_bytes_lower, memory.budget
    if lower > budget:
        return [_weights_too_big(plan, memory, where, tp, smallest_tp)]
    if lower + plan.sequence_bytes > budget:
        return [_sequence_too_long(plan, memory, where, longest, max_model_len)]
    need = plan.weight_bytes + plan.activation_bytes + plan.sequence_bytes
    if need <= budget:
        return []
    return [
        Diagnostic(
            "memory-tight",
            f"weights, activations and one full sequence take about {_gib(need)} of the "
            f"{_gib(budget)} that {memory.name} may give",
            why=f"weights {_gib(plan.weight_bytes)}, activations {_gib(plan.activation_bytes)}, "
            f"one sequence of {max_model_len:,} tokens {_gib(plan.sequence_bytes)}",
            where=where,
            fix="a smaller --max-model-len or --max-num-batched-tokens, if loading fails",
            severity="warning",
        )
    ]


def _weights_too_big(
    plan: MemoryPlan, memory: DeviceMemory, where: str, tp: int, smallest_tp: int | None
) -> Diagnostic:
    each = f" on each of {tp} ranks" if tp > 1 else ""
    if memory.free < memory.total * 0.9 and plan.weight_bytes_lower <= memory.total * 0.9:
        held = "the system" if memory.unified else "other processes"
        fix = f"free the {_gib(memory.total - memory.free)} that {held} hold, or a smaller model"
    elif smallest_tp is not None:
        fix = f"--tensor-parallel-size {smallest_tp}, or a smaller or quantized model"
    else:
        fix = "a smaller or quantized model, or a device with more memory"
    return Diagnostic(
        "memory-weights",
        f"the weights take {_gib(plan.weight_bytes_lower)}{each}, {memory.name} can give "
        f"{_gib(memory.budget)}",
        why=f"{_gib(memory.free)} of {_gib(memory.total)} are free",
        where=where,
        fix=fix,
        exit_code=ExitCode.HARDWARE,
    )


def _sequence_too_long(
    plan: MemoryPlan, memory: DeviceMemory, where: str, longest: int, max_model_len: int
) -> Diagnostic:
    left = memory.budget - plan.weight_bytes_lower
    fix = f"--max-model-len {longest}" if longest else "a smaller model"
    return Diagnostic(
        "memory-kv-cache",
        f"the KV cache cannot hold one sequence of {max_model_len:,} tokens: it takes "
        f"{_gib(plan.sequence_bytes)}, {_gib(left)} are left",
        why=f"weights take {_gib(plan.weight_bytes_lower)} of the {_gib(memory.budget)} that "
        f"{memory.name} can give",
        where=where,
        fix=f"{fix}, or more memory (--gpu-memory-utilization, --tensor-parallel-size)",
    )


def check_concurrency(plan: MemoryPlan, max_num_seqs: int, block_size: int) -> list[Diagnostic]:
    """A batch of max_num_seqs that cannot hold one block a sequence can only preempt."""
    blocks = plan.kv_tokens // block_size
    if blocks >= max_num_seqs or plan.kv_bytes == 0:
        return []
    return [
        Diagnostic(
            "memory-preempts",
            f"{max_num_seqs} sequences at once can only preempt each other",
            why=f"the KV cache has about {blocks} blocks of {block_size} tokens",
            fix=f"--max-num-seqs {max(1, blocks // 4)}",
            severity="warning",
        )
    ]


def _gib(size: int) -> str:
    return f"{size / GiB:.1f} GiB" if size >= GiB // 10 else f"{size / (1 << 20):.1f} MiB"
