# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels of the CPU backend (csrc/cpu), where they were built.

They are compiled when the package is installed from source and called through ctypes; they
run on torch's own OpenMP threads, since torch is loaded first and both name the same library.
"""

from __future__ import annotations

import ctypes
import functools
import glob
from pathlib import Path
from typing import Any

import torch

_PACKAGE = Path(__file__).resolve().parents[2]
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""What the kernels compute in, by the number they know it by."""


@functools.cache
def cpu_kernels() -> Any:
    """The shared library, or None where no compiler was there to build it."""
    found = glob.glob(str(_PACKAGE / "_cpu_kernels*.so"))
    if not found:
        return None
    library = ctypes.CDLL(found[0])
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.vllm_attention_lanes.restype = size
    for name, arguments in {
        "vllm_paged_attention": [*[pointer] * 9, ctypes.c_float],
        "vllm_rms_norm": [*[pointer] * 4, *[size] * 5, ctypes.c_float],
        "vllm_rotary_and_cache": [*[pointer] * 11, ctypes.c_float],
        "vllm_silu_and_mul": [pointer, pointer, size, size],
        "vllm_argmax": [pointer, pointer, size, size, size],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_int, *arguments], None
    return library


def has_kernels(dtype: torch.dtype) -> bool:
    """Whether the kernels were built, and compute in `dtype`."""
    return dtype in DTYPES and cpu_kernels() is not None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; x is (n, size) or (n, heads, size).

    With `residual` (dense, like x) it first becomes residual + x, in place. The result is dense.
    """
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    cpu_kernels().vllm_rms_norm(
        DTYPES[x.dtype],
        out.data_ptr(),
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        x.shape[0] * heads,
        heads,
        x.shape[-1],
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        eps,
    )
    return out


def rotary_and_cache(
    qk: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """Turn queries and keys, store keys and values; returns the queries, dense.

    qk: (num_tokens, heads + kv_heads, head_dim) and v: (num_tokens, kv_heads, head_dim), a token's
    heads side by side. Caches: (blocks, block_size, kv_heads, head_dim), contiguous. slot_mapping:
    (num_tokens,) int64, -1 stores nothing. cos, sin: (num_tokens, head_dim / 2) float32.
    norms: weights (head_dim,) of a query's and a key's RMS norm before the turn, and epsilon.
    """
    num_tokens, num_kv_heads, head_dim = v.shape
    num_heads = qk.shape[1] - num_kv_heads
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=qk.dtype)
    sizes = (num_tokens, num_heads, num_kv_heads, head_dim, qk.stride(0), v.stride(0))
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    cpu_kernels().vllm_rotary_and_cache(
        DTYPES[qk.dtype],
        out.data_ptr(),
        qk.data_ptr(),
        v.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slot_mapping.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        None if q_weight is None else q_weight.data_ptr(),
        None if k_weight is None else k_weight.data_ptr(),
        (ctypes.c_int64 * 6)(*sizes),
        eps,
    )
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :d]) * x[:, d:] of a dense (n, 2 d); d is a multiple of 16."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype)
    cpu_kernels().vllm_silu_and_mul(DTYPES[x.dtype], out.data_ptr(), x.data_ptr(), rows, size)
    return out


def argmax(x: torch.Tensor) -> torch.Tensor:
    """(n,) int64: the first largest of each row; -1 where a row has NaN or an infinite maximum."""
    out = torch.empty(x.shape[0], dtype=torch.int64)
    cpu_kernels().vllm_argmax(
        DTYPES[x.dtype], out.data_ptr(), x.data_ptr(), x.shape[0], x.shape[1], x.stride(0)
    )
    return out
