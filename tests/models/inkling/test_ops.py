# SPDX-License-Identifier: Apache-2.0
"""Inkling's own kernels against their plain forms; interpreted where there is no GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vllm.attention.metadata import ForwardContext, GroupMetadata
from vllm.models.inkling.common import short_conv
from vllm.models.inkling.common.moe import route
from vllm.models.inkling.common.ops.routing import route_sigmoid
from vllm.models.inkling.common.ops.short_conv import short_conv as short_conv_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, ROWS = 8, 4


def forward_context(requests: list[tuple[int, int]]) -> ForwardContext:
    """Requests as (tokens of this step, tokens before it), decode requests first."""
    counts = torch.tensor([count for count, _ in requests])
    histories = torch.tensor([before for _, before in requests])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    table = 1 + torch.arange(4 * len(requests), dtype=torch.int32).view(len(requests), 4)
    positions, slots = [], []
    for row, (count, before) in enumerate(requests):
        for position in range(before, before + count):
            positions.append(position)
            overtaken = position + ROWS < before + count
            same_block = position // BLOCK == (position + ROWS) // BLOCK
            slot = int(table[row, position // BLOCK]) * ROWS + position % ROWS
            slots.append(-1 if overtaken and same_block else slot)
    return ForwardContext(
        positions=torch.tensor(positions),
        query_start_loc=starts.to(torch.int32),
        seq_lens=(histories + counts).to(torch.int32),
        num_reqs=len(requests),
        num_tokens=int(counts.sum()),
        num_decode_reqs=sum(count == 1 for count, _ in requests),
        max_query_len=int(counts.max()),
        max_seq_len=4 * BLOCK,
        groups=[GroupMetadata(table, torch.tensor(slots))],
        block_size=BLOCK,
    )


@pytest.mark.parametrize(
    "requests",
    [
        [(1, 0), (1, 1), (1, 2), (1, 3), (1, 15)],
        [(1, 9), (2, 0), (3, 2), (11, 7)],
    ],
    ids=["decode", "chunks"],
)
@pytest.mark.parametrize("taps", [2, 4])
def test_short_conv_reads_the_past_of_its_own_request(
    requests: list[tuple[int, int]], taps: int
) -> None:
    fwd = forward_context(requests)
    plan = short_conv.make_conv_plan(fwd, 0, taps, ROWS)
    generator = torch.Generator().manual_seed(taps)
    wide = torch.randn(fwd.num_tokens, 50, generator=generator)
    state = torch.randn((4 * len(requests) + 1) * ROWS, 60, generator=generator)
    weight = torch.randn(40, taps, generator=generator)
    want_state = state.clone()
    want = short_conv.short_conv(wide[:, 5:45], weight, want_state[:, 10:50], plan)
    wide, state = wide.to(DEVICE), state.to(DEVICE)
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    moved = {n: v if v is None else v.to(DEVICE) for n, v in fields.items()}
    got = short_conv_op(
        wide[:, 5:45],
        weight.to(DEVICE),
        state[:, 10:50],
        *(moved[n] for n in ("past_slots", "request_of", "starts", "slot_mapping")),
    )
    torch.testing.assert_close(got.cpu(), want)
    # The plain form stores what need not be stored in the null block.
    torch.testing.assert_close(state[ROWS:].cpu(), want_state[ROWS:], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(("num_experts", "num_shared", "top_k"), [(8, 2, 3), (20, 0, 6), (5, 1, 5)])
def test_router_chooses_by_bias_and_weighs_without_it(
    num_experts: int, num_shared: int, top_k: int
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits = 30 * torch.randn(7, num_experts + num_shared, generator=generator)
    logits[3] = -200.0  # no sigmoid of these is a number above 0
    bias, scale = torch.randn(num_experts, generator=generator), torch.tensor([0.7])
    want, want_ids = route(logits, bias, scale, 8.0, top_k)
    moved = (t.to(DEVICE) for t in (logits, bias, scale))
    weights, ids = route_sigmoid(*moved, 8.0, top_k)
    assert ids.tolist() == want_ids.tolist()
    torch.testing.assert_close(weights.cpu(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(want.sum(-1), torch.full((7,), 0.7 * 8.0))
