# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation: x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467)."""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F
from torch import nn

from vllm.layers.context import BuildContext
from vllm.layers.linear import new_parameter
from vllm.layers.ops import cpu


class RMSNorm(nn.Module):
    """Normalises the last axis in float32, after adding a residual where one is given."""

    def __init__(self, ctx: BuildContext, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (size,)
        self.weight = new_parameter(ctx, size)

    def load(self, kind: str, tensor: torch.Tensor, part: int | None = None) -> None:
        """Copy the checkpoint's (size,) weight."""
        assert kind == "weight" and part is None
        self.weight.copy_(tensor)

    @overload
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
    @overload
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """norm(x), or (norm(x + residual), x + residual); both may be overwritten then."""
        if x.is_cuda:
            from vllm.layers.ops.norm import rms_norm

            normed = rms_norm(x, self.weight, self.eps, residual)
            return normed if residual is None else (normed, residual)
        if cpu.has_kernels(x.dtype) and x.stride(-1) == 1 and x.dim() in (2, 3):
            normed = cpu.rms_norm(x, self.weight, self.eps, residual)
            return normed if residual is None else (normed, residual)
        if residual is None:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        x = x.add_(residual)
        return F.rms_norm(x, self.shape, self.weight, self.eps), x
