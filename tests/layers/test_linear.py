# SPDX-License-Identifier: Apache-2.0
"""What each rank holds of a matrix, and that packing changes nothing but the speed."""

from __future__ import annotations

import pytest
import torch

from tests.fixtures.forward import build_context
from vllm.distributed.parallel_state import TensorParallelGroup
from vllm.layers.context import BuildContext
from vllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

CONFIG = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
}


def ranks(count: int, dtype: torch.dtype = torch.float32) -> list[BuildContext]:
    return [build_context(CONFIG, dtype, TensorParallelGroup(r, count)) for r in range(count)]


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_columns_of_all_ranks_joined_are_the_whole_product() -> None:
    weight, x = matrix(12, 16), matrix(3, 16, 1)
    parts = []
    for ctx in ranks(4):
        layer = ColumnParallelLinear(ctx, 16, 12)
        layer.load("weight", weight)
        parts.append(layer(x))
    torch.testing.assert_close(torch.cat(parts, 1), x @ weight.T)


def test_rows_of_all_ranks_sum_to_the_whole_product_with_the_bias_once() -> None:
    weight, bias, x = matrix(12, 16), matrix(1, 12, 2)[0], matrix(3, 16, 1)
    total = torch.zeros(3, 12)
    for rank, ctx in enumerate(ranks(4)):
        layer = RowParallelLinear(ctx, 16, 12, bias=True)
        layer.load("weight", weight)
        layer.load("bias", bias)
        part = x[:, rank * 4 : rank * 4 + 4]
        total += layer.apply_weight(part, layer.bias if rank == 0 else None)
    torch.testing.assert_close(total, x @ weight.T + bias)


def test_a_merged_layer_keeps_each_ranks_part_of_gate_beside_its_part_of_up() -> None:
    gate, up = matrix(8, 16), matrix(8, 16, 1)
    for rank, ctx in enumerate(ranks(2)):
        layer = MergedColumnParallelLinear(ctx, 16, [8, 8])
        layer.load("weight", up, 1)
        layer.load("weight", gate, 0)
        rows = slice(rank * 4, rank * 4 + 4)
        torch.testing.assert_close(layer.weight.data, torch.cat([gate[rows], up[rows]]))


@pytest.mark.parametrize(("num_kv_heads", "kv_rows"), [(4, [0, 1, 2, 3]), (2, [0, 0, 1, 1])])
def test_key_heads_are_repeated_when_there_are_more_ranks(
    num_kv_heads: int, kv_rows: list[int]
) -> None:
    head_dim, num_heads = 4, 8
    q, k, v = matrix(32, 16), matrix(num_kv_heads * 4, 16, 1), matrix(num_kv_heads * 4, 16, 2)
    for rank, ctx in enumerate(ranks(4)):
        layer = QKVParallelLinear(ctx, 16, head_dim, num_heads, num_kv_heads)
        for part, tensor in enumerate((q, k, v)):
            layer.load("weight", tensor, part)
        assert (layer.num_heads, layer.num_kv_heads) == (2, 1)
        head = slice(kv_rows[rank] * 4, kv_rows[rank] * 4 + 4)
        expected = torch.cat([q[rank * 8 : rank * 8 + 8], k[head], v[head]])
        torch.testing.assert_close(layer.weight.data, expected)


def test_a_vocabulary_that_ranks_do_not_divide_is_padded_with_zeros() -> None:
    table = matrix(10, 16)
    rows = []
    for ctx in ranks(4):
        embedding = VocabParallelEmbedding(ctx, 10, 16)
        embedding.load("weight", table)
        rows.append(embedding.weight.data)
    torch.testing.assert_close(torch.cat(rows), torch.cat([table, torch.zeros(2, 16)]))


def test_a_head_leaves_out_the_ids_that_cannot_be_sampled() -> None:
    (ctx,) = ranks(1)
    head = ParallelLMHead(ctx, 10, 16, sampled_vocab_size=7)
    weight, x = matrix(10, 16), matrix(2, 16, 1)
    head.load("weight", weight)
    torch.testing.assert_close(head(x), x @ weight[:7].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_packed_weight_gives_the_same_product(dtype: torch.dtype, rows: int) -> None:
    (ctx,) = ranks(1, dtype)
    layer = ColumnParallelLinear(ctx, 48, 40, bias=True)
    layer.load("weight", matrix(40, 48))
    layer.load("bias", matrix(1, 40, 1)[0])
    x = matrix(rows, 48, 2).to(dtype)
    plain = layer(x)
    with torch.inference_mode():
        layer.process_weights_after_loading()
        assert layer.packed is not None and layer.weight.numel() == 0
        packed = layer(x)
    exact = x.double() @ matrix(40, 48).to(dtype).double().T + matrix(1, 40, 1).to(dtype).double()
    bound = 2 * (plain.double() - exact).abs().max() + 1e-6
    assert (packed.double() - exact).abs().max() <= bound
