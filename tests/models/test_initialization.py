# SPDX-License-Identifier: Apache-2.0
"""Every registered architecture can be built, filled with dummy weights and run one step."""

from __future__ import annotations

import json

import pytest
import torch

from tests.fixtures.forward import load_tiny
from tests.fixtures.tiny_models import tiny_checkpoint
from tests.models.utils import skip_if_capability_restricted
from vllm.models.registry import MODELS

# What a tiny instance is made from. A draft head is built with the model that it drafts for.
FAMILY_OF = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "InklingForCausalLM": "inkling-text",
    "InklingForConditionalGeneration": "inkling",
}


def test_every_servable_architecture_has_a_tiny_checkpoint() -> None:
    assert set(FAMILY_OF) == {e.architecture for e in MODELS.values() if e.kind != "draft"}


@pytest.mark.parametrize("architecture", sorted(FAMILY_OF))
def test_can_initialize_large_subset(architecture: str) -> None:
    skip_if_capability_restricted(architecture)
    path = tiny_checkpoint(FAMILY_OF[architecture])
    assert json.loads((path / "config.json").read_text())["architectures"] == [architecture]
    logits = load_tiny(path, "dummy").step({"a": [1, 2, 3]})["a"]
    assert logits.shape[0] == 3
    assert torch.isfinite(logits).all()
