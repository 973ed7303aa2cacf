# SPDX-License-Identifier: Apache-2.0
"""RMS norm of rows, with the residual added on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.layers.ops.chips import dependent_launch


@triton.jit
def rms_norm_kernel(
    out_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    stride_token,
    stride_head,
    num_heads,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row a program; rows of (tokens, heads) may lie apart, residual and out are dense."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    live = offsets < SIZE
    start = (row // num_heads).to(tl.int64) * stride_token + (row % num_heads) * stride_head
    x = tl.load(x_ptr + start + offsets, mask=live, other=0.0).to(tl.float32)
    dense = row.to(tl.int64) * SIZE + offsets
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + dense, mask=live, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + dense, rounded, mask=live)
        x = rounded.to(tl.float32)
    inverse = tl.math.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + offsets, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + dense, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=live)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; x is (n, size) or (n, heads, size).

    With `residual` (dense, like x) it first becomes residual + x, in place. The last axis of x
    must be contiguous; the result is dense.
    """
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.shape[0] * heads
    if rows == 0:
        return out
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(rows,)](
        out,
        x,
        x if residual is None else residual,
        weight,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        heads,
        eps,
        SIZE=size,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, block // 512)),
        **dependent_launch(x.device),
    )
    return out
