# SPDX-License-Identifier: Apache-2.0
"""Inkling's attention as its model asks for it: scale 1/D, bias r P, local and global layers.

The oracle has no pages and no bias table: it computes r[t] P[:, t - s] for each pair of tokens.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import Case, build
from vllm.attention.ops.triton_attention import paged_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOCAL = {"window": 32, "extent": 32}
GLOBAL = {"window": None, "extent": 48}


@pytest.mark.parametrize("layer", [LOCAL, GLOBAL], ids=["local", "global"])
@pytest.mark.parametrize("num_queries", [1, 3, 40], ids=["decode", "drafted", "chunk"])
def test_the_last_queries_of_a_history_see_projected_distances(
    layer: dict[str, int | None], num_queries: int
) -> None:
    keys, head_dim, group, d_rel = 100, 64, 4, 16
    case = Case(((num_queries, keys),), 16, group, 1, head_dim, **layer)
    batch = build(case, torch.float32, DEVICE)
    extent = case.extent
    assert extent is not None
    generator = torch.Generator().manual_seed(3)
    r = torch.randn(num_queries, group, d_rel, generator=generator).to(DEVICE)
    projection = torch.randn(d_rel, extent, generator=generator).to(DEVICE)
    batch.rel_logits, batch.scale = r @ projection, 1 / head_dim
    out = torch.full_like(batch.q, torch.nan)
    decodes = case.num_decode_reqs
    paged_attention(out, **batch.arguments(), num_decode_reqs=decodes)

    blocks = batch.block_table[0].long()
    for row, position in enumerate(range(keys - num_queries, keys)):
        first = 0 if case.window is None else max(0, position - case.window + 1)
        seen = torch.arange(first, position + 1, device=DEVICE)
        k = batch.k_cache[blocks[seen // 16], seen % 16, 0]
        v = batch.v_cache[blocks[seen // 16], seen % 16, 0]
        distance = position - seen
        far = distance >= extent
        columns = projection[:, distance.clamp(max=extent - 1)]  # (d_rel, keys)
        bias = (r[row] @ columns).masked_fill(far, 0.0)  # (heads, keys)
        want = (batch.q[row] @ k.T / head_dim + bias).softmax(-1) @ v
        torch.testing.assert_close(out[row], want, rtol=1e-4, atol=1e-5)
