# SPDX-License-Identifier: Apache-2.0
"""Routing and experts against a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from tests.fixtures.forward import build_context
from vllm.layers.moe import DOWN, GATE, UP, FusedMoE, route_softmax

CONFIG = {
    "model_type": "llama",
    "vocab_size": 8,
    "intermediate_size": 8,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
}


def reference(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, parts: dict[int, torch.Tensor]
) -> torch.Tensor:
    """One token and one expert at a time, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up, down = (parts[p][expert].double() for p in (GATE, UP, DOWN))
            hidden = torch.nn.functional.silu(gate @ x[token].double()) * (up @ x[token].double())
            out[token] += weight.double() * (down @ hidden)
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize("packed", [False, True])
def test_grouped_experts_equal_a_loop_over_tokens(num_tokens: int, packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = {
        GATE: torch.randn(6, 12, 16, generator=generator) / 4,
        UP: torch.randn(6, 12, 16, generator=generator) / 4,
        DOWN: torch.randn(6, 16, 12, generator=generator) / 4,
    }
    moe = FusedMoE(build_context(CONFIG), 6, 16, 12)
    for part, matrices in parts.items():
        for expert, matrix in enumerate(matrices):
            moe.load("weight", matrix, part, expert)
    with torch.inference_mode():
        if packed:
            moe.process_weights_after_loading()
        x = torch.randn(num_tokens, 16, generator=generator)
        logits = torch.randn(num_tokens, 6, generator=generator)
        logits[:, 5] = -100  # an expert that nobody asks
        weights, ids = route_softmax(logits, 2, renormalize=True)
        error = moe(x, weights, ids).double() - reference(x, weights, ids, parts)
    assert error.abs().max() < 1e-5


def test_routing_takes_the_largest_and_normalises_when_asked() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    probabilities = logits.softmax(-1)[0]
    weights, ids = route_softmax(logits, 2, renormalize=False)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights[0], probabilities[[1, 2]])
    weights, _ = route_softmax(logits, 2, renormalize=True)
    torch.testing.assert_close(weights[0], probabilities[[1, 2]] / probabilities[[1, 2]].sum())
