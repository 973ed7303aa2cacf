# SPDX-License-Identifier: Apache-2.0
"""y = x W^T + b, with W's rows or columns divided over the tensor-parallel ranks.

On the CPU the weights are packed once for oneDNN after loading: torch's own path repacks
them (bfloat16) or asks MKL (float32), which is slow on AMD. Measured on 2 Zen 4 cores for
6144 x 1024: bfloat16, 1 row 271 -> 101 us; float32, 1 row 1336 -> 335 us, 64 rows 6.8 -> 3.8 ms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from vllm.layers.context import BuildContext


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """`weight` (out, in) as an opaque oneDNN tensor for `packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())


def packed_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x (num_tokens, in) times a packed weight, (num_tokens, out)."""
    return _packed_linear_op()(x, packed, bias, "none", [], "")


@functools.cache
def _packed_linear_op() -> Callable[..., torch.Tensor]:
    """Looked up once: finding it takes longer than a product with a small weight."""
    return torch.ops.mkldnn._linear_pointwise.default


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights of `dtype` on `device` profit from packing."""
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
    )


def new_parameter(ctx: BuildContext, *size: int) -> nn.Parameter:
    """Room for a weight in the model's dtype on its device; nothing is computed for it."""
    return nn.Parameter(torch.empty(size, dtype=ctx.dtype, device=ctx.device), False)


def shard(tensor: torch.Tensor, dim: int, rank: int, world_size: int) -> torch.Tensor:
    """Rank's equal part of `tensor` along `dim`, a view."""
    if world_size == 1:
        return tensor
    size = tensor.shape[dim] // world_size
    return tensor.narrow(dim, rank * size, size)


class Linear(nn.Module):
    """This rank's part of a matrix; base of the sharded ones and whole on every rank itself."""

    def __init__(
        self, ctx: BuildContext, input_size: int, output_size: int, bias: bool = False
    ) -> None:
        """Sizes are those of this rank's part."""
        super().__init__()
        self.tp = ctx.tp
        self.input_size = input_size
        self.output_size = output_size
        self.packed: torch.Tensor | None = None
        self.weight = new_parameter(ctx, output_size, input_size)
        self.bias = new_parameter(ctx, output_size) if bias else None

    def load(self, kind: str, tensor: torch.Tensor, part: int | None = None) -> None:
        """Copy the rows that this rank needs of a checkpoint's `kind` ("weight" or "bias")."""
        assert part is None
        self.get_parameter(kind).copy_(tensor)

    def process_weights_after_loading(self) -> None:
        """Pack the weight where that makes products faster; it is gone as a parameter then."""
        if can_pack(self.weight.device, self.weight.dtype):
            self.packed = pack_weight(self.weight)
            self.weight.data = self.weight.data.new_empty(0)

    def apply_weight(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + bias with this rank's part of W."""
        if self.packed is not None:
            return packed_linear(x, self.packed, bias)
        if x.is_cuda and x.shape[:-1] == (1,):
            from vllm.layers.ops.linear import matrix_vector

            return matrix_vector(x, self.weight, bias)
        return F.linear(x, self.weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, input_size) -> (num_tokens, output_size)."""
        return self.apply_weight(x, self.bias)


class ColumnParallelLinear(Linear):
    """Each rank computes its part of the outputs; nothing is exchanged."""

    def __init__(
        self, ctx: BuildContext, input_size: int, output_size: int, bias: bool = False
    ) -> None:
        super().__init__(ctx, input_size, output_size // ctx.tp.world_size, bias)

    def load(self, kind: str, tensor: torch.Tensor, part: int | None = None) -> None:
        assert part is None
        self.get_parameter(kind).copy_(shard(tensor, 0, self.tp.rank, self.tp.world_size))


class MergedColumnParallelLinear(Linear):
    """Several matrices over one input in one product; a rank has its part of each, in order."""

    def __init__(
        self, ctx: BuildContext, input_size: int, output_sizes: list[int], bias: bool = False
    ) -> None:
        """`output_sizes` are those of the whole matrices."""
        self.part_sizes = [size // ctx.tp.world_size for size in output_sizes]
        super().__init__(ctx, input_size, sum(self.part_sizes), bias)

    def load(self, kind: str, tensor: torch.Tensor, part: int | None = None) -> None:
        assert part is not None
        target = self.get_parameter(kind).split(self.part_sizes)[part]
        target.copy_(shard(tensor, 0, self.tp.rank, self.tp.world_size))


class QKVParallelLinear(Linear):
    """Query, key and value projections (parts 0, 1, 2) in one product, divided by heads.

    With more ranks than KV heads every KV head lives on several ranks.
    """

    def __init__(
        self,
        ctx: BuildContext,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool = False,
    ) -> None:
        """Head counts are those of the whole model."""
        world_size = ctx.tp.world_size
        self.num_heads = num_heads // world_size
        self.num_kv_heads = max(1, num_kv_heads // world_size)
        self.kv_copies = max(1, world_size // num_kv_heads)
        kv_size = self.num_kv_heads * head_dim
        self.part_sizes = [self.num_heads * head_dim, kv_size, kv_size]
        super().__init__(ctx, hidden_size, sum(self.part_sizes), bias)

    def load(self, kind: str, tensor: torch.Tensor, part: int | None = None) -> None:
        assert part is not None
        rank, world_size = self.tp.rank, self.tp.world_size
        if part > 0:
            rank, world_size = rank // self.kv_copies, world_size // self.kv_copies
        target = self.get_parameter(kind).split(self.part_sizes)[part]
        target.copy_(shard(tensor, 0, rank, world_size))


class RowParallelLinear(Linear):
    """Each rank has its part of the inputs; the products are summed over the ranks."""

    def __init__(
        self, ctx: BuildContext, input_size: int, output_size: int, bias: bool = False
    ) -> None:
        super().__init__(ctx, input_size // ctx.tp.world_size, output_size, bias)

    def load(self, kind: str, tensor: torch.Tensor, part: int | None = None) -> None:
        assert part is None
        if kind == "weight":
            tensor = shard(tensor, 1, self.tp.rank, self.tp.world_size)
        self.get_parameter(kind).copy_(tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, input_size) -> (num_tokens, output_size), equal on all ranks."""
        if self.tp.world_size == 1:
            return self.apply_weight(x, self.bias)
        # One rank adds the bias, so that the sum has it once.
        bias = self.bias if self.tp.rank == 0 else None
        return self.tp.all_reduce(self.apply_weight(x, bias))


def padded_vocab_size(vocab_size: int, world_size: int) -> int:
    """Smallest multiple of the ranks that is at least `vocab_size`."""
    return math.ceil(vocab_size / world_size) * world_size
