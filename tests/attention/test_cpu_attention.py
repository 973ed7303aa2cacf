# SPDX-License-Identifier: Apache-2.0
"""The C++ attention kernel and the torch form that replaces it, against the float32 reference."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch

from tests.kernels import cases
from vllm.attention.backends import cpu
from vllm.attention.backends.cpu import CpuAttention
from vllm.attention.metadata import ForwardContext, GroupMetadata
from vllm.attention.ops import cpu_attention
from vllm.attention.ops.cpu_attention import can_attend
from vllm.attention.ops.reference import paged_attention

CASES = [
    # heads, KV heads, head_dim, block size, window, extent, lengths
    (4, 2, 64, 16, None, 0, [1, 15, 16, 17, 200]),
    (8, 1, 128, 64, None, 0, [300, 1]),
    (3, 3, 16, 16, 20, 0, [1, 19, 20, 21, 90]),
    (8, 2, 32, 16, None, 40, [5, 39, 40, 41, 130]),
    (8, 4, 48, 16, 24, 24, [1, 23, 24, 25, 77]),
    (16, 2, 128, 16, 30, 50, [100] * 9),
]


def test_the_kernel_is_built_where_a_compiler_is() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++: the package installs without the kernel")
    assert can_attend(torch.float32, 64)
    assert can_attend(torch.bfloat16, 128)
    assert not can_attend(torch.float16, 64)
    assert not can_attend(torch.float32, 12)


@pytest.mark.parametrize("kernel", [True, False], ids=["c++", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_decode_equals_the_reference(
    case: tuple, dtype: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads, dim, size, window, extent, lengths = case
    if kernel and not can_attend(dtype, dim):
        pytest.skip("the kernel is not built here")
    if not kernel:
        monkeypatch.setattr(cpu, "can_attend", lambda *_: False)
    torch.manual_seed(0)
    width, count = -(-max(lengths) // size), len(lengths)
    shape = (1 + count * width, size, kv_heads, dim)
    # Rows that nobody wrote are NaN, but for the null block, which nobody writes.
    k_cache, v_cache = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    k_cache[0] = v_cache[0] = 0
    table = torch.zeros(count, width, dtype=torch.int32)
    blocks = iter((torch.randperm(shape[0] - 1) + 1).tolist())
    for row, length in enumerate(lengths):
        for column in range(-(-length // size)):
            block = next(blocks)
            used = min(size, length - column * size)
            table[row, column] = block
            for cache in (k_cache, v_cache):
                cache[block, :used] = torch.randn(used, kv_heads, dim).to(dtype)
    # A view with strides of its own, as a slice of a merged projection is.
    q = torch.randn(count, heads + 3, dim).to(dtype)[:, :heads]
    rel = torch.randn(count, heads, extent).to(dtype) if extent else None
    lens = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.arange(count + 1, dtype=torch.int32)
    fwd = ForwardContext(
        positions=lens.long() - 1,
        query_start_loc=starts,
        seq_lens=lens,
        num_reqs=count,
        num_tokens=count,
        num_decode_reqs=count,
        max_query_len=1,
        max_seq_len=max(lengths),
        groups=[GroupMetadata(table, torch.zeros(count, dtype=torch.int64))],
        block_size=size,
    )
    layer = SimpleNamespace(
        k_cache=k_cache,
        v_cache=v_cache,
        k_rows=k_cache.flatten(0, 1),
        v_rows=v_cache.flatten(0, 1),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        window=window,
        group=0,
    )
    got = CpuAttention().attend(layer, q, fwd, fwd.groups[0], rel)
    want = torch.empty(count, heads, dim)
    paged_attention(
        want, q, k_cache, v_cache, table, lens, starts, 1, max(lengths), dim**-0.5, window, rel
    )
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", cases.CASES)
def test_the_kernel_passes_the_shared_table(name: str, dtype: torch.dtype) -> None:
    case = cases.CASES[name]
    if not can_attend(dtype, case.head_dim):
        pytest.skip("the kernel is not built here")
    batch = cases.build(case, dtype)
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    want, peer = (torch.empty(batch.q.shape, dtype=t) for t in (wide, dtype))
    paged_attention(want, **batch.arguments(), compute_dtype=wide)
    paged_attention(peer, **batch.arguments(), compute_dtype=dtype)
    got = cpu_attention.paged_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        batch.scale,
        batch.window,
        batch.rel_logits,
    )
    cases.assert_close(name, got, want, peer)
