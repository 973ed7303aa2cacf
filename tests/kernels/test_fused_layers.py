# SPDX-License-Identifier: Apache-2.0
"""The layers' fused kernels against plain torch; interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vllm.layers.ops.activation import silu_and_mul
from vllm.layers.ops.cache import reshape_and_cache
from vllm.layers.ops.linear import matrix_vector
from vllm.layers.ops.moe import fused_experts
from vllm.layers.ops.norm import rms_norm
from vllm.layers.ops.rotary import rotary_and_cache
from vllm.layers.ops.routing import group_by_expert, route_softmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def test_norm_of_heads_that_lie_in_wider_rows() -> None:
    x, weight = randn(3, 5, 48), randn(48)
    want = F.rms_norm(x[:, 1:4], (48,), weight, 1e-6)
    torch.testing.assert_close(rms_norm(x[:, 1:4], weight, 1e-6), want)


def test_norm_adds_the_residual_in_place() -> None:
    x, residual, weight = randn(4, 40), randn(5, 40)[1:].clone(), randn(40)
    total = x + residual
    out = rms_norm(x, weight, 1e-5, residual)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(out, F.rms_norm(total, (40,), weight, 1e-5))


@pytest.mark.parametrize("inner", [7, 1500])
def test_silu_and_mul_halves_its_rows(inner: int) -> None:
    x = randn(3, 2 * inner)
    torch.testing.assert_close(silu_and_mul(x), F.silu(x[:, :inner]) * x[:, inner:])


@pytest.mark.parametrize("head_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 3), (5, 1)])
def test_rotary_turns_halves_and_stores_keys_and_values(
    heads: int, kv_heads: int, head_norm: bool
) -> None:
    merged = randn(5, heads + 2 * kv_heads, 16)
    qk, v = merged[:, : heads + kv_heads], merged[:, heads + kv_heads :]
    positions = torch.tensor([0, 3, 100, 7, 9], device=DEVICE)
    slots = torch.tensor([8, -1, 30, 0, 31], device=DEVICE)
    frequencies = 10000.0 ** -(torch.arange(0, 16, 2, device=DEVICE) / 16)
    k_cache = torch.full((4, 8, kv_heads, 16), -1.0, device=DEVICE)
    v_cache = k_cache.clone()
    weights = randn(2, 16)
    norms = (weights[0], weights[1], 1e-2) if head_norm else None
    got = rotary_and_cache(qk, v, k_cache, v_cache, slots, positions, frequencies, 1.5, norms)
    if head_norm:
        q = F.rms_norm(qk[:, :heads], (16,), weights[0], 1e-2)
        qk = torch.cat([q, F.rms_norm(qk[:, heads:], (16,), weights[1], 1e-2)], 1)
    angles = positions[:, None, None] * frequencies
    left, right = qk[..., :8], qk[..., 8:]
    cos, sin = angles.cos() * 1.5, angles.sin() * 1.5
    want = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
    torch.testing.assert_close(got, want[:, :heads], rtol=1e-5, atol=1e-5)
    for cache, rows in ((k_cache, want[:, heads:]), (v_cache, v)):
        stored = torch.full((32, kv_heads, 16), -1.0, device=DEVICE)
        stored[[8, 30, 0, 31]] = rows[[0, 2, 3, 4]]
        torch.testing.assert_close(cache.view(32, kv_heads, 16), stored, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size_in", "size_out"), [(1024, 5), (1500, 3), (48, 64)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matrix_vector_is_a_product_of_one_row(
    with_bias: bool, size_in: int, size_out: int
) -> None:
    x, weight = randn(1, size_in), randn(size_out, size_in)
    bias = randn(size_out) if with_bias else None
    torch.testing.assert_close(matrix_vector(x, weight, bias), F.linear(x, weight, bias))


def test_keys_and_values_go_to_their_slots_and_to_no_other() -> None:
    k_cache = torch.full((4, 8, 2, 16), -1.0, device=DEVICE)
    v_cache, rows = k_cache.clone(), randn(3, 4, 16)
    slots = torch.tensor([9, -1, 30], device=DEVICE)
    reshape_and_cache(rows[:, :2], rows[:, 2:], k_cache, v_cache, slots)
    for cache, part in ((k_cache, rows[:, :2]), (v_cache, rows[:, 2:])):
        want = torch.full((32, 2, 16), -1.0, device=DEVICE)
        want[9], want[30] = part[0], part[2]
        assert torch.equal(cache.view(32, 2, 16), want)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (20, 6), (128, 8)])
def test_routing_takes_the_most_probable_experts(
    num_experts: int, top_k: int, renormalize: bool
) -> None:
    logits = randn(5, num_experts + 3)[:, :num_experts]
    weights, ids = route_softmax(logits, top_k, renormalize)
    want, want_ids = logits.softmax(-1).topk(top_k, -1)
    if renormalize:
        want = want / want.sum(-1, keepdim=True)
    assert ids.tolist() == want_ids.tolist()
    torch.testing.assert_close(weights, want)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_routing_of_logits_that_are_not_numbers_names_experts_all_the_same() -> None:
    _, ids = route_softmax(torch.full((2, 6), torch.nan, device=DEVICE), 2, True)
    assert int(ids.min()) >= 0 and int(ids.max()) < 6


def test_grouping_places_every_assignment_once_in_a_tile_of_its_expert() -> None:
    ids = torch.tensor([[0, 2], [2, 5], [2, 0], [5, 2]], device=DEVICE)
    grouping = group_by_expert(ids, 6, 2)
    # 2 of expert 0, 4 of expert 2 and 2 of expert 5 are 4 tiles; shapes bound them by 6 + 8 // 2.
    assert grouping.experts.tolist() == [0, 2, 2, 5] + 6 * [-1]
    assert grouping.rows.tolist() == [0, 5, 1, 2, 4, 7, 3, 6] + 12 * [8]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "block_m"), [(50, 16, 16), (37, 5, 32), (1600, 7, 64)]
)
def test_grouping_pads_experts_to_tiles(num_tokens: int, num_experts: int, block_m: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(num_experts - 1, (num_tokens, 3), generator=generator).to(torch.int32)
    grouping = group_by_expert(ids.to(DEVICE), num_experts, block_m)
    rows, experts = [], []
    for expert in range(num_experts - 1):
        mine = (ids.flatten() == expert).nonzero().flatten().tolist()
        tiles = -(-len(mine) // block_m)
        rows += mine + (tiles * block_m - len(mine)) * [ids.numel()]
        experts += tiles * [expert]
    unused = len(grouping.experts) - len(experts)
    assert grouping.experts.tolist() == experts + unused * [-1]
    assert grouping.rows.tolist() == rows + unused * block_m * [ids.numel()]


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 60])
def test_fused_experts_is_the_weighted_sum_of_its_experts(num_tokens: int) -> None:
    experts, top_k, hidden, inner = 6, 2, 40, 24
    x, weights = randn(num_tokens, hidden), randn(num_tokens, top_k).abs()
    w13, w2 = randn(experts, 2 * inner, hidden) / 6, randn(experts, hidden, inner) / 5
    order = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(experts, generator=order)[:top_k] for _ in range(num_tokens)])
    want = torch.zeros_like(x)
    for token in range(num_tokens):
        for j in range(top_k):
            expert = int(ids[token, j])
            gate_up = w13[expert] @ x[token]
            activated = F.silu(gate_up[:inner]) * gate_up[inner:]
            want[token] += weights[token, j] * (w2[expert] @ activated)
    got = fused_experts(x, w13, w2, weights, ids.to(DEVICE))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
