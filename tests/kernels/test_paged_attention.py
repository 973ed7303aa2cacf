# SPDX-License-Identifier: Apache-2.0
"""Attention kernels against the float32 reference, and the reference against its formula.

On a machine without a GPU Triton interprets the kernels; with one, they are compiled.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.cases import CASES, Case, assert_close, build, sweep
from vllm.attention.ops import reference, triton_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def attend(case: Case, dtype: torch.dtype, seed: int = 0) -> None:
    """The Triton kernels beside the reference on one case."""
    batch = build(case, dtype, DEVICE, seed)
    arguments = batch.arguments()
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    want = torch.full(batch.q.shape, torch.nan, dtype=wide, device=DEVICE)
    reference.paged_attention(want, **arguments, compute_dtype=wide)
    peer, got = torch.full_like(batch.q, torch.nan), torch.full_like(batch.q, torch.nan)
    reference.paged_attention(peer, **arguments, compute_dtype=dtype)
    triton_attention.paged_attention(got, **arguments, num_decode_reqs=case.num_decode_reqs)
    assert_close("out", got, want, peer)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_triton_gives_the_reference_in_float32(case: Case) -> None:
    attend(case, torch.float32)


@pytest.mark.parametrize(
    "name", ["decode-gqa-8-bias", "drafted-tokens", "prefill-bias", "mixed-empty-rows"]
)
def test_triton_gives_the_reference_in_float16(name: str) -> None:
    attend(CASES[name], torch.float16)


@pytest.mark.gpu  # Triton's interpreter multiplies the bit patterns of bfloat16 as integers
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_triton_gives_the_reference_in_bfloat16(case: Case) -> None:
    attend(case, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep())
def test_triton_gives_the_reference_over_the_whole_sweep(name: str) -> None:
    attend(sweep()[name], torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sweep())
def test_compiled_triton_gives_the_reference_in_bfloat16(name: str) -> None:
    attend(sweep()[name], torch.bfloat16)


@pytest.mark.parametrize(("window", "extent"), [(None, None), (5, None), (5, 9), (9, 4)])
def test_the_reference_is_its_formula(window: int | None, extent: int | None) -> None:
    case = Case(((3, 12), (1, 0), (1, 7)), 4, 4, 2, 8, window, extent)
    batch = build(case, torch.float32)
    out = torch.full_like(batch.q, torch.nan)
    reference.paged_attention(out, **batch.arguments())
    token = 0
    for r, (queries, keys) in enumerate(case.requests):
        for position in range(keys - queries, keys) if keys else range(1):
            for head in range(case.num_heads):
                total, value = 0.0, torch.zeros(case.head_dim)
                for key in range(position + 1) if keys else ():
                    distance = position - key
                    if window is not None and distance >= window:
                        continue
                    block = batch.block_table[r, key // case.page]
                    where = (block, key % case.page, head // 2)
                    score = batch.scale * float(batch.q[token, head] @ batch.k_cache[where])
                    if batch.rel_logits is not None and distance < batch.rel_logits.shape[2]:
                        score += float(batch.rel_logits[token, head, distance])
                    total += math.exp(score)
                    value += math.exp(score) * batch.v_cache[where]
                want = value / total if total else value
                torch.testing.assert_close(out[token, head], want, rtol=1e-5, atol=1e-6)
            token += 1


def test_a_workspace_of_the_stated_size_serves_every_case_in_turn() -> None:
    case = CASES["decode-lengths-around-a-page"]
    batch = build(case, torch.float32, DEVICE)
    elements = triton_attention.workspace_elements(
        batch.q.device, batch.q.dtype, case.num_heads, case.num_kv_heads, case.head_dim
    )
    guard = 64
    work = torch.full((elements + guard,), torch.nan, device=DEVICE)
    for name in ("decode-lengths-around-a-page", "drafted-tokens", "decode-an-empty-row-between"):
        batch = build(CASES[name], torch.float32, DEVICE)
        want, got = torch.full_like(batch.q, torch.nan), torch.full_like(batch.q, torch.nan)
        reference.paged_attention(want, **batch.arguments())
        triton_attention.paged_attention(got, **batch.arguments(), workspace=work[:elements])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert work[elements:].isnan().all()


def test_queries_keys_and_bias_may_lie_in_wider_rows() -> None:
    case = CASES["mixed-decodes-first"]
    batch = build(case, torch.float32, DEVICE)
    want, out = torch.full_like(batch.q, torch.nan), torch.full_like(batch.q, torch.nan)
    reference.paged_attention(want, **batch.arguments())
    tokens = batch.q.shape[0]
    fused = torch.cat([batch.q.flatten(1), torch.full((tokens, 24), torch.nan, device=DEVICE)], 1)
    batch.q = fused[:, : case.num_heads * case.head_dim].view_as(batch.q)
    assert batch.rel_logits is not None
    batch.rel_logits = torch.cat([batch.rel_logits, batch.rel_logits], 2)[..., : case.extent]
    triton_attention.paged_attention(out, **batch.arguments(), num_decode_reqs=case.num_decode_reqs)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_rows_that_nobody_owns_stay_as_they_are() -> None:
    case = CASES["mixed-decodes-first"]
    batch = build(case, torch.float32, DEVICE)
    padding = 5
    wide = torch.cat([batch.q, torch.full_like(batch.q[:padding], torch.nan)])
    out = torch.full_like(wide, 7.0)
    batch.q = wide
    if batch.rel_logits is not None:
        filler = torch.full_like(batch.rel_logits[:padding], torch.nan)
        batch.rel_logits = torch.cat([batch.rel_logits, filler])
    triton_attention.paged_attention(out, **batch.arguments(), num_decode_reqs=case.num_decode_reqs)
    assert (out[-padding:] == 7.0).all()
    assert out[:-padding].isfinite().all()


@pytest.mark.gpu
def test_a_captured_decode_follows_lengths_that_change_after_capture() -> None:
    case = Case(tuple((1, 3000) for _ in range(5)), 16, 8, 1, 128, None, 512)
    batch = build(case, torch.bfloat16, "cuda")
    out = torch.full_like(batch.q, torch.nan)
    elements = triton_attention.workspace_elements(batch.q.device, batch.q.dtype, 8, 1, 128)
    work = torch.empty(elements, device="cuda")

    def call() -> None:
        triton_attention.paged_attention(
            out, **batch.arguments(), workspace=work, num_decode_reqs=5
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lengths in ([1, 17, 3000, 0, 900], [3000, 3000, 2, 1, 128]):
        batch.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        graph.replay()
        want, peer = torch.empty_like(out, dtype=torch.float32), torch.empty_like(out)
        reference.paged_attention(want, **batch.arguments())
        reference.paged_attention(peer, **batch.arguments(), compute_dtype=torch.bfloat16)
        assert_close("out", out, want, peer)
