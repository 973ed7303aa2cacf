# SPDX-License-Identifier: Apache-2.0
"""Norm and gate against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from tests.fixtures.forward import build_context
from vllm.layers.activation import SiluAndMul
from vllm.layers.norm import RMSNorm

CONFIG = {
    "model_type": "llama",
    "vocab_size": 8,
    "intermediate_size": 8,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
}
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


def expected_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_is_its_formula(dtype: torch.dtype, with_residual: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(build_context(CONFIG, dtype), 48, eps=1e-2)
    norm.weight.copy_(torch.randn(48, generator=generator))
    x = torch.randn(5, 48, generator=generator).to(dtype)
    residual = torch.randn(5, 48, generator=generator).to(dtype)
    if with_residual:
        total = x + residual
        out, new_residual = norm(x, residual)
        torch.testing.assert_close(new_residual, total, rtol=0, atol=0)
    else:
        total, out = x, norm(x)
    error = (out.double() - expected_norm(total, norm.weight, 1e-2)).abs().max()
    assert error <= TOLERANCE[dtype]


def test_the_gate_comes_first() -> None:
    x = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    gate, up = x[:, :5].double(), x[:, 5:].double()
    expected = gate / (1 + (-gate).exp()) * up
    assert (SiluAndMul()(x).double() - expected).abs().max() < 1e-6
