# SPDX-License-Identifier: Apache-2.0
"""Relative attention with FlashAttention 4, and what that kernel has on which GPU.

Two forms of one operation, `softmax(scale * q k^T + bias) v` with
bias = rel_logits[token, head, distance] below the extent and 0 beyond:
Hopper takes flash-attn-4 with a `score_mod` that gathers the bias; 10.x and 11.x take
tml-fa4, which reads it through a sheared copy and can split the keys.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from vllm import platforms
from vllm.errors import UnsupportedModelError
from vllm.platforms.cuda import capability_restriction, refusal
from vllm.platforms.interface import DeviceCapability

# Facts of the kernel sources pinned in cmake/external_projects/tml_fa4.cmake, by compute
# capability major. Change them together with that pin; the capability table in
# vllm/platforms/cuda.py and the tests hold on to them.
_NO_PAGED_KV_MAJORS = frozenset({12})
_SHEARED_BIAS_MAJORS = frozenset({10, 11})
_SPLIT_KV_MAJORS = frozenset({10, 11})

_ARCHITECTURE = "InklingForConditionalGeneration"
_KEYS_PER_TILE = 128
_QUERY_ROWS_PER_TILE = 256
PAGE_SIZE = 128
"""The page size at which Hopper loads K and V through TMA."""


def check_inkling_fa4_support(attention_backend: str | None = None) -> None:
    """Raise `UnsupportedModelError` if this device's FA4 cannot attend over a paged cache.

    A backend that needs no FA4 passes, and so does an unknown capability: the kernel's own
    assertion is then what remains.
    """
    restriction = capability_restriction(_ARCHITECTURE)
    assert restriction is not None
    if attention_backend in restriction.lifted_by:
        return
    try:
        capability = platforms.current_platform.get_device_capability()
        name = platforms.current_platform.get_device_name()
    except RuntimeError:
        return
    if capability is None or capability.major not in _NO_PAGED_KV_MAJORS:
        return
    raise UnsupportedModelError(refusal(_ARCHITECTURE, restriction, [(0, name, capability)], 1))


def inkling_fa4_num_splits(
    capability: DeviceCapability | None,
    is_local: bool,
    batch_size: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    max_kv_len: int,
) -> int:
    """Into how many parts the keys of a step are split; 1 where the kernel cannot.

    max_query_len is a power of two, heads are those of one rank, max_kv_len is constant
    for a deployment (the context length). Few sequences leave multiprocessors idle, so
    their keys are spread over more of them; local layers have too few keys to share out.
    """
    if capability is None or capability.major not in _SPLIT_KV_MAJORS or is_local:
        return 1
    group = num_heads // num_kv_heads
    tiles = math.ceil(max_query_len * group / _QUERY_ROWS_PER_TILE)
    single = tiles == 1 and batch_size == 1
    target = 256 if single else 128 if tiles == 1 else 64
    cap = _single_sequence_cap(num_kv_heads, max_kv_len) if single else 128
    wanted = target // (batch_size * num_kv_heads * tiles)
    return max(1, min(wanted, cap, math.ceil(max_kv_len / _KEYS_PER_TILE)))


def _single_sequence_cap(num_kv_heads: int, max_kv_len: int) -> int:
    if num_kv_heads == 8:
        return 16
    if num_kv_heads == 4 or max_kv_len <= 8192:
        return 32
    return 64 if max_kv_len <= 65536 else 128


def fa4_rel_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    rel_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over a paged cache; arguments as in vllm.attention.ops.

    q, out: (num_tokens, heads, head_dim); caches (blocks, page, kv_heads, head_dim);
    rel_logits: (num_tokens, heads, extent) or None. Returns `out`.
    """
    capability = platforms.current_platform.get_device_capability()
    rounded = 1 << max(0, max_query_len - 1).bit_length()
    arguments: dict[str, Any] = {
        "cu_seqlens_q": query_start_loc,
        "max_seqlen_q": rounded,
        "seqused_k": seq_lens,
        "page_table": block_table,
        "softmax_scale": scale,
        "causal": True,
        "window_size": (None, None) if window is None else (window - 1, 0),
        "num_splits": inkling_fa4_num_splits(
            capability,
            window is not None,
            len(seq_lens),
            rounded,
            q.shape[1],
            k_cache.shape[2],
            max_seq_len,
        ),
    }
    if rel_logits is not None and capability and capability.major in _SHEARED_BIAS_MAJORS:
        from tml_fa4.interface import flash_attn_varlen_func as sheared

        result = sheared(q, k_cache, v_cache, rel_bias=rel_logits, **arguments)
    else:
        from flash_attn.cute.interface import flash_attn_varlen_func

        if rel_logits is not None:
            arguments["score_mod"] = _relative_bias_mod()
            arguments["aux_tensors"] = [rel_logits]
        result = flash_attn_varlen_func(q, k_cache, v_cache, **arguments)
    return out.copy_(result[0] if isinstance(result, tuple) else result)


@functools.cache
def _relative_bias_mod() -> Any:
    """FA4's score_mod that adds the bias; made once, since FA4 keys its compilations by it."""
    import cutlass
    import cutlass.cute as cute

    @cute.jit
    def relative_bias(scores, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        rel = aux_tensors[0]
        distance = q_idx + (seqlen_info.seqlen_k - seqlen_info.seqlen_q) - kv_idx
        inside = (distance >= 0) & (distance < rel.shape[2])
        count = cutlass.const_expr(cute.size(scores.shape))
        rows = cute.make_rmem_tensor(count, cutlass.Int32)
        rows.store(q_idx + seqlen_info.offset_q)
        heads = cute.make_rmem_tensor(count, cutlass.Int32)
        heads.store(h_idx)
        columns = cute.make_rmem_tensor(count, cutlass.Int32)
        columns.store(cute.where(inside, distance, cute.full_like(distance, 0)))
        bias = cute.make_rmem_tensor(count, rel.element_type)
        for j in cutlass.range(count, unroll_full=True):
            bias[j] = rel[rows[j], heads[j], columns[j]]
        added = bias.load().to(cutlass.Float32)
        return scores + cute.where(inside, added, cute.full_like(added, 0.0))

    return relative_bias
