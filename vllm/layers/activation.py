# SPDX-License-Identifier: Apache-2.0
"""Gated activation of a transformer's MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from vllm.layers.ops import cpu


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:] for x of (..., 2 d)."""
    if x.is_cuda:
        from vllm.layers.ops import activation

        return activation.silu_and_mul(x)
    if cpu.has_kernels(x.dtype) and x.is_contiguous() and x.shape[-1] % 32 == 0:
        return cpu.silu_and_mul(x)
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


class SiluAndMul(nn.Module):
    """SwiGLU's gate: (num_tokens, 2 d) -> (num_tokens, d), gate first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)
