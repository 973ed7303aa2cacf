# SPDX-License-Identifier: Apache-2.0
"""y = x W^T + b for one row of x: bound by reading W once.

cuBLAS takes tiles of eight rows and splits long inner sizes into a second kernel. H200, bf16,
against it: 28,672 x 4,096 55 to 61 -> 55 us, 4,096 x 14,336 30 -> 28 us, 6,144 x 4,096 16 -> 14 us,
4,096 x 4,096 12.5 -> 10 us. With two rows cuBLAS is the faster one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.layers.ops.chips import dependent_launch

_BLOCK_K = 1024


@triton.jit
def matrix_vector_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    K,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row of the weight a program: the many programs keep enough bytes in flight."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK_K)
    weight_row = weight_ptr + row.to(tl.int64) * K
    products = tl.zeros([BLOCK_K], tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = k + offsets < K
        weight = tl.load(weight_row + k + offsets, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + k + offsets, mask=inside, other=0.0).to(tl.float32)
        products += weight * x
    y = tl.sum(products, 0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty))


def matrix_vector(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x (1, in) times weight (out, in), transposed, plus bias (out,); sums are float32.

    The last axis of x and the weight must be contiguous.
    """
    out = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device)
    matrix_vector_kernel[(weight.shape[0],)](
        out,
        x,
        weight,
        weight if bias is None else bias,
        weight.shape[1],
        BLOCK_K=_BLOCK_K,
        HAS_BIAS=bias is not None,
        num_warps=4,
        **dependent_launch(x.device),
    )
    return out
