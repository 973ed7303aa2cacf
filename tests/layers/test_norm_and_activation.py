# SPDX-License-Identifier: Apache-2.0
"""Norm and gate against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.fixtures.forward import build_context
from vllm.layers.activation import SiluAndMul
from vllm.layers.norm import RMSNorm
from vllm.layers.ops import cpu

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [12, 64, 257])
def test_the_cpp_norm_equals_the_plain_form(size: int, dtype: torch.dtype) -> None:
    """Rows of a merged projection's heads, and rows with a residual."""
    if cpu.cpu_kernels() is None:
        pytest.skip("the kernels are not built here")
    torch.manual_seed(0)
    weight = torch.randn(size).to(dtype)
    heads = torch.randn(5, 7, size).to(dtype)[:, 2:6]
    wanted = F.rms_norm(heads.float(), (size,), weight.float(), 1e-5)
    limit = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 8e-3}
    torch.testing.assert_close(cpu.rms_norm(heads, weight, 1e-5).float(), wanted, **limit)
    x, residual = torch.randn(2, 9, size).to(dtype)
    total = x + residual
    got = cpu.rms_norm(x, weight, 1e-5, residual)
    torch.testing.assert_close(residual, total, rtol=0, atol=0)
    wanted = F.rms_norm(total.float(), (size,), weight.float(), 1e-5)
    torch.testing.assert_close(got.float(), wanted, **limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpp_gate_equals_the_plain_form(dtype: torch.dtype) -> None:
    """Over the whole range: exponentials must neither overflow nor lose the small ones."""
    if cpu.cpu_kernels() is None:
        pytest.skip("the kernels are not built here")
    x = torch.cat([torch.linspace(-120, 120, 256), torch.randn(256)]).to(dtype).view(4, 128)
    gate, up = x.double().chunk(2, -1)
    wanted = gate / (1 + (-gate).exp()) * up
    limit = (
        {"rtol": 2e-6, "atol": 1e-30} if dtype == torch.float32 else {"rtol": 5e-3, "atol": 1e-30}
    )
    torch.testing.assert_close(cpu.silu_and_mul(x).double(), wanted, **limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 16, 1000])
def test_the_cpp_argmax_takes_the_first_largest_and_marks_broken_rows(
    size: int, dtype: torch.dtype
) -> None:
    if cpu.cpu_kernels() is None:
        pytest.skip("the kernels are not built here")
    x = torch.randn(7, size + 3, generator=torch.Generator().manual_seed(0)).to(dtype)[:, :size]
    x[1, 2] = x[1, size - 1] = 9.0
    x[2, size // 2], x[3, size - 1], x[4, 0] = torch.nan, torch.inf, -torch.inf
    x[5] = -torch.inf
    wanted = x.max(-1).indices
    wanted[torch.tensor([2, 3, 5])] = -1
    assert wanted[1] == 2
    assert cpu.argmax(x).tolist() == wanted.tolist()
