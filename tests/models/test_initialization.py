# SPDX-License-Identifier: Apache-2.0
"""Every registered architecture can be built, filled with dummy weights and run one step."""

from __future__ import annotations

import json

import pytest
import torch

from tests.fixtures.forward import load_tiny
from tests.fixtures.tiny_models import TEXT_FAMILIES, tiny_checkpoint
from tests.models.utils import skip_if_capability_restricted
from vllm.models.registry import MODELS

# What a tiny instance is made from; drafts are built with the model that they draft for.
FAMILY_OF = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "InklingForCausalLM": "inkling-text",
    "InklingForConditionalGeneration": "inkling",
    "InklingMTPModel": "inkling",
}


def test_every_registered_architecture_has_a_tiny_checkpoint() -> None:
    assert set(FAMILY_OF) == set(MODELS)


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_can_initialize_large_subset(architecture: str) -> None:
    skip_if_capability_restricted(architecture)
    family = FAMILY_OF[architecture]
    path = tiny_checkpoint(family)
    if family not in TEXT_FAMILIES:
        pytest.skip("built with convolution caches in tests/models/inkling")
    assert architecture in json.loads((path / "config.json").read_text())["architectures"]
    logits = load_tiny(path, "dummy").step({"a": [1, 2, 3]})["a"]
    assert logits.shape == (3, 512)
    assert torch.isfinite(logits).all()
