# SPDX-License-Identifier: Apache-2.0
"""silu(gate) * up in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.layers.ops.chips import dependent_launch

_BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(
    out_ptr,
    x_ptr,
    stride_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One (row, block of columns) a program; x holds gate and up beside each other."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < SIZE
    gate = tl.load(x_ptr + row * stride_row + columns, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_row + SIZE + columns, mask=live, other=0.0).to(tl.float32)
    # The gate is rounded as the plain form rounds it.
    gate = (gate * tl.sigmoid(gate)).to(x_ptr.dtype.element_ty).to(tl.float32)
    out = (gate * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + columns, out, mask=live)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :d]) * x[:, d:] for x of (n, 2 d) with a contiguous last axis."""
    size = x.shape[-1] // 2
    out = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
    if x.shape[0]:
        grid = (x.shape[0], triton.cdiv(size, _BLOCK))
        options = dependent_launch(x.device)
        silu_and_mul_kernel[grid](
            out, x, x.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=4, **options
        )
    return out
