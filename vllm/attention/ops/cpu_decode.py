# SPDX-License-Identifier: Apache-2.0
"""The C++ decode kernel (csrc/cpu/paged_attention.cpp), where it was built.

It is compiled when the package is installed from source and called through ctypes; it runs
on torch's own OpenMP threads, since torch is loaded first and both name the same library.
"""

from __future__ import annotations

import ctypes
import functools
import glob
from pathlib import Path
from typing import Any

import torch

_PACKAGE = Path(__file__).resolve().parents[2]
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


@functools.cache
def _library() -> Any:
    """The shared library, or None where no compiler was there to build it."""
    found = glob.glob(str(_PACKAGE / "_cpu_kernels*.so"))
    if not found:
        return None
    library = ctypes.CDLL(found[0])
    pointer = ctypes.c_void_p
    library.vllm_paged_decode.argtypes = [ctypes.c_int, *[pointer] * 8, ctypes.c_float]
    library.vllm_paged_decode.restype = None
    library.vllm_decode_lanes.restype = ctypes.c_int64
    return library


def can_decode(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel is there for this dtype and head width."""
    library = _library()
    return library is not None and dtype in _DTYPES and head_dim % library.vllm_decode_lanes() == 0


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    rel_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token a request; (num_reqs, heads, head_dim).

    q: (num_reqs, heads, head_dim), last axis contiguous. Caches: (blocks, block_size, kv_heads,
    head_dim), contiguous. block_table: (num_reqs, max_blocks) int32. seq_lens: (num_reqs,)
    int32; rows of length 0 are left as they are. rel_logits: (num_reqs, heads, extent).
    """
    num_reqs, num_heads, head_dim = q.shape
    out = torch.empty((num_reqs, num_heads, head_dim), dtype=q.dtype)
    rel_strides = (0, 0) if rel_logits is None else rel_logits.stride()[:2]
    extent = 0 if rel_logits is None else rel_logits.shape[2]
    sizes = (ctypes.c_int64 * 12)(
        num_reqs,
        num_heads,
        k_cache.shape[2],
        head_dim,
        k_cache.shape[1],
        block_table.stride(0),
        q.stride(0),
        q.stride(1),
        *rel_strides,
        extent,
        window or 0,
    )
    _library().vllm_paged_decode(
        _DTYPES[q.dtype],
        out.data_ptr(),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_table.data_ptr(),
        seq_lens.data_ptr(),
        None if rel_logits is None else rel_logits.data_ptr(),
        sizes,
        scale,
    )
    return out
