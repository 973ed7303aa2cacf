# SPDX-License-Identifier: Apache-2.0
"""A model's sizes in one normal form, whatever its config.json calls them.

Checks, memory plans and the engine read these; a model file reads its own
oddities from the raw dictionary. Each architecture's registry entry names the
function that fills this record from config.json.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

AttentionKind = Literal["full", "sliding"]


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """One decoder layer before sharding."""

    attention: AttentionKind
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Keys that a query sees, its own included; None: all."""
    rel_extent: int = 0
    """Reach of a relative-position bias in tokens; 0: none."""
    conv_taps: int = 0
    """Taps of short convolutions whose past inputs must be kept; 0: none."""
    conv_width: int = 0
    """Values a token leaves for all convolutions of the layer: 2 * kv * head_dim + 2 * hidden."""
    is_moe: bool = False


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a whole text model before sharding."""

    hidden_size: int
    vocab_size: int
    """Rows of the embedding."""
    intermediate_size: int
    max_position_embeddings: int
    layers: tuple[LayerShape, ...]
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    tie_word_embeddings: bool = False
    logits_vocab_size: int | None = None
    """Ids that can be sampled where the embedding is padded; None: vocab_size."""
    mtp_layers: tuple[LayerShape, ...] = ()
    """The draft head's depths."""

    @property
    def num_mtp_layers(self) -> int:
        """Tokens that the draft head can look ahead."""
        return len(self.mtp_layers)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def sampled_vocab_size(self) -> int:
        """Number of ids that can be sampled or given in a request."""
        return self.logits_vocab_size or self.vocab_size
