# SPDX-License-Identifier: Apache-2.0
"""The table of paged batches that every attention implementation is tested on, and their data.

A batch is hostile on purpose: pages lie in random order, blocks behind a window are given back
(the table names the null block), and every cache row that no request may read is NaN, as are
the output rows before the call.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch of one attention layer."""

    requests: tuple[tuple[int, int], ...]
    """(query tokens, keys) of each request; the queries are its last positions."""
    page: int = 16
    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 64
    window: int | None = None
    extent: int | None = None

    @property
    def num_decode_reqs(self) -> int:
        """Leading requests of one query token each."""
        lengths = [queries for queries, _ in self.requests]
        return next((i for i, n in enumerate(lengths) if n != 1), len(lengths))

    @property
    def max_query_len(self) -> int:
        return max(queries for queries, _ in self.requests)


EDGES = (1, 15, 16, 17, 100)
"""Lengths around a page of 16 tokens: one key, page - 1, page, page + 1, many pages."""

CASES = {
    "decode-lengths-around-a-page": Case(tuple((1, n) for n in EDGES)),
    "decode-an-empty-row-between": Case(((1, 40), (1, 0), (1, 3), (1, 0))),
    "decode-page-64": Case(((1, 63), (1, 64), (1, 65), (1, 200)), page=64),
    "decode-page-128-head-128": Case(((1, 127), (1, 129)), 128, 8, 8, 128),
    "decode-gqa-8-bias": Case(((1, 70), (1, 9)), 16, 8, 1, 64, None, 24),
    "decode-extent-beyond-the-sequence": Case(((1, 20), (1, 33)), extent=64),
    "decode-window-shorter-than-extent": Case(((1, 90), (1, 12)), window=20, extent=40),
    "decode-window-longer-than-extent": Case(((1, 90), (1, 12)), window=40, extent=20),
    "decode-window-of-a-key": Case(((1, 50), (1, 1)), window=1),
    "decode-several-heads": Case(((1, 45), (1, 80)), 16, 4, 2, 64, 33, 17),
    "drafted-tokens": Case(((4, 60), (1, 9), (3, 3), (2, 17)), window=31, extent=20),
    "head-dim-80-is-padded": Case(((1, 30), (3, 20)), 16, 4, 2, 80, None, 16),
    "prefill-whole-prompts": Case(((37, 37), (40, 40), (1, 1)), 16, 4, 1),
    "prefill-mid-history": Case(((35, 90), (40, 41)), 16, 8, 1, 64),
    "prefill-gqa-1-head-128": Case(((130, 139),), 64, 1, 1, 128),
    "prefill-bias": Case(((40, 75), (33, 33)), extent=24),
    "prefill-window": Case(((40, 100), (35, 35)), window=24),
    "prefill-window-shorter-than-extent": Case(((36, 80),), window=18, extent=30),
    "prefill-window-longer-than-extent": Case(((36, 80),), window=50, extent=20),
    "prefill-bias-page-128": Case(((35, 140),), 128, 4, 1, 64, None, 40),
    "mixed-decodes-first": Case(((1, 50), (1, 16), (34, 70), (2, 2)), extent=20),
    "mixed-empty-rows": Case(((1, 0), (1, 31), (36, 36), (0, 0), (5, 12)), window=30, extent=20),
}
"""Default suite: small, since an interpreter runs them where there is no GPU."""


def sweep() -> dict[str, Case]:
    """Every page size, group, head_dim and relation of window and extent."""
    table = {}
    for page in (16, 64, 128):
        for group in (1, 4, 8):
            for head_dim in (64, 128):
                for window, extent in ((None, None), (None, 48), (30, 48), (70, 48), (70, None)):
                    lengths = (1, page - 1, page, page + 1, 0, 3 * page + 5)
                    decode = tuple((1, n) for n in lengths)
                    chunk = (129 // group + 2, page + 150 // group)
                    name = f"page-{page}-gqa-{group}-dim-{head_dim}-w-{window}-e-{extent}"
                    shape = (page, 2 * group, 2, head_dim, window, extent)
                    table[f"{name}-decode"] = Case(decode, *shape)
                    table[f"{name}-mixed"] = Case(((1, page + 1), chunk, (7, 7)), *shape)
    return table


@dataclasses.dataclass
class Batch:
    """Tensors of a case, under the argument names of `paged_attention`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int
    scale: float
    window: int | None
    rel_logits: torch.Tensor | None

    def arguments(self) -> dict[str, object]:
        """Keyword arguments of `paged_attention` but `out`."""
        return dict(vars(self))


def build(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Batch:
    """Random tensors of a case, equal on every device."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    counts = [-(-keys // case.page) for _, keys in case.requests]
    order = (torch.randperm(sum(counts) + 2, generator=generator) + 1).tolist()
    table = torch.zeros(len(counts), max(1, *counts) + 1, dtype=torch.int32)
    shape = (sum(counts) + 3, case.page, case.num_kv_heads, case.head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    for r, (queries, keys) in enumerate(case.requests):
        first = 0 if case.window is None else max(0, keys - queries - case.window + 1)
        for index in range(first // case.page, counts[r]):
            block = order.pop()
            table[r, index] = block
            low = max(0, first - index * case.page)
            high = min(case.page, keys - index * case.page)
            for cache in (k_cache, v_cache):
                cache[block, low:high] = randn(high - low, *shape[2:])
    num_tokens = sum(queries for queries, _ in case.requests)
    starts = torch.tensor([0, *(queries for queries, _ in case.requests)]).cumsum(0)
    rel = None if case.extent is None else randn(num_tokens, case.num_heads, case.extent)
    return Batch(
        randn(num_tokens, case.num_heads, case.head_dim).to(device, dtype),
        k_cache.to(device, dtype),
        v_cache.to(device, dtype),
        table.to(device),
        torch.tensor([keys for _, keys in case.requests], dtype=torch.int32, device=device),
        starts.to(device, torch.int32),
        case.max_query_len,
        max(keys for _, keys in case.requests),
        case.head_dim**-0.5,
        case.window,
        None if rel is None else rel.to(device, dtype),
    )


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, peer: torch.Tensor) -> None:
    """Error of `got` against `want` at most twice that of `peer`, torch in the dtype of `got`.

    A kernel on a GPU may add the error of its exponential beside torch's exact one: PTX gives
    `ex2.approx` a relative one of 2^-22.
    """
    assert got.dtype == peer.dtype and got.shape == want.shape
    error = (got.to(want.dtype) - want).abs()
    unit = torch.finfo(got.dtype).eps
    if got.is_cuda:
        unit = max(unit, 2.0**-22)
    floor = unit * want.abs().max().clamp(min=1.0)
    allowed = 2 * (peer.to(want.dtype) - want).abs().max() + floor
    bad = ~(error <= allowed)  # a NaN is bad too
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.numel()} differ by more than {float(allowed):.2e}; "
            f"the first at {where}: got {float(got[where]):.6g}, want {float(want[where]):.6g}"
        )
