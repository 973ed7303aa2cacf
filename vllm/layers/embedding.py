# SPDX-License-Identifier: Apache-2.0
"""Token embedding and output head, their vocabulary divided over the tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from vllm.layers.context import BuildContext
from vllm.layers.linear import Linear, new_parameter, padded_vocab_size


def _load_rows(target: torch.Tensor, tensor: torch.Tensor, rank: int, vocab_size: int) -> None:
    """Copy rank's rows of a whole (vocab_size, ...) tensor; rows past the vocabulary are zero."""
    first = rank * target.shape[0]
    count = max(0, min(vocab_size - first, target.shape[0]))
    target[:count].copy_(tensor[first : first + count])
    target[count:].zero_()


class VocabParallelEmbedding(nn.Module):
    """Rows of a table by token id; each rank holds an equal range of ids."""

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.tp = ctx.tp
        self.vocab_size = vocab_size
        self.num_rows = padded_vocab_size(vocab_size, ctx.tp.world_size) // ctx.tp.world_size
        self.first_row = ctx.tp.rank * self.num_rows
        self.weight = new_parameter(ctx, self.num_rows, hidden_size)

    def load(self, kind: str, tensor: torch.Tensor, part: int | None = None) -> None:
        """Copy this rank's rows of the checkpoint's (vocab_size, hidden_size) table."""
        assert kind == "weight" and part is None
        _load_rows(self.weight, tensor, self.tp.rank, self.vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) ids -> (num_tokens, hidden_size), equal on all ranks."""
        if self.tp.world_size == 1:
            return F.embedding(input_ids, self.weight)
        rows = input_ids - self.first_row
        elsewhere = (rows < 0) | (rows >= self.num_rows)
        embedded = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self.tp.all_reduce(embedded.masked_fill_(elsewhere[:, None], 0))


class ParallelLMHead(Linear):
    """Logits of the whole vocabulary, gathered from every rank's range of ids."""

    def __init__(
        self,
        ctx: BuildContext,
        vocab_size: int,
        hidden_size: int,
        sampled_vocab_size: int | None = None,
    ) -> None:
        """`sampled_vocab_size` cuts the padding that a checkpoint's head carries."""
        padded = padded_vocab_size(vocab_size, ctx.tp.world_size)
        super().__init__(ctx, hidden_size, padded // ctx.tp.world_size)
        self.vocab_size = vocab_size
        self.sampled_vocab_size = sampled_vocab_size or vocab_size

    def load(self, kind: str, tensor: torch.Tensor, part: int | None = None) -> None:
        assert kind == "weight" and part is None
        _load_rows(self.weight, tensor, self.tp.rank, self.vocab_size)

    def tie_to(self, embedding: VocabParallelEmbedding) -> None:
        """Use the embedding's table; on the CPU packing makes it a second copy."""
        self.weight.data = embedding.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, hidden_size) -> (n, sampled_vocab_size)."""
        logits = self.apply_weight(x, None)
        if self.tp.world_size > 1:
            logits = self.tp.all_gather(logits, dim=-1)
        return logits[:, : self.sampled_vocab_size]
