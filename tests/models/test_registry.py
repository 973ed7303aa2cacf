# SPDX-License-Identifier: Apache-2.0
"""Every registered architecture has a class, a shape reader and a way into the engine."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from tests.models.utils import skip_if_capability_restricted
from vllm.errors import ConfigError
from vllm.models.registry import (
    GGUF_ARCHITECTURES,
    MODELS,
    load_model_class,
    load_shape_reader,
    resolve,
)

SERVABLE = sorted(e.architecture for e in MODELS.values() if e.kind != "draft")


@pytest.mark.parametrize("architecture", SERVABLE)
def test_the_class_of_a_servable_architecture_has_the_model_interface(architecture: str) -> None:
    skip_if_capability_restricted(architecture)
    model_class = load_model_class(architecture)
    assert issubclass(model_class, torch.nn.Module)
    assert list(inspect.signature(model_class.__init__).parameters)[1] == "ctx"
    for method in ("forward", "compute_logits", "load_weights"):
        assert callable(getattr(model_class, method)), method


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_every_architecture_has_a_shape_reader(architecture: str) -> None:
    reader = load_shape_reader(MODELS[architecture])
    assert len(inspect.signature(reader).parameters) >= 1


@pytest.mark.parametrize("architecture", SERVABLE)
def test_a_servable_architecture_resolves_to_its_own_entry(architecture: str) -> None:
    assert resolve([architecture]) is MODELS[architecture]
    assert resolve(["NobodyKnowsForCausalLM", architecture]) is MODELS[architecture]


def test_every_gguf_architecture_is_registered() -> None:
    assert set(GGUF_ARCHITECTURES.values()) <= set(SERVABLE)


@pytest.mark.parametrize(
    ("architecture", "code", "hint"),
    [
        ("LlamaForCasualLM", "architecture-unknown", "nearest: LlamaForCausalLM"),
        ("Qwen3MoEForCausalLM", "architecture-unknown", "nearest: Qwen3MoeForCausalLM"),
        ("Zzz", "architecture-unknown", "known: LlamaForCausalLM"),
        ("", "architecture-unknown", "known: LlamaForCausalLM"),
        ("BertForMaskedLM", "architecture-not-servable", "it is an encoder"),
        ("LlamaForSequenceClassification", "architecture-not-servable", "it classifies"),
        ("T5ForConditionalGeneration", "architecture-not-servable", "encoder-decoder"),
        ("InklingMTPModel", "architecture-not-servable", "draft head"),
    ],
)
def test_an_architecture_that_is_not_served_says_why(
    architecture: str, code: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([architecture])
    (finding,) = caught.value.findings
    assert finding.code == code
    assert hint in finding.why


def test_resolving_imports_neither_a_model_nor_torch() -> None:
    code = (
        "import sys; from vllm.models.registry import MODELS, resolve\n"
        "[resolve([n]) for n, e in MODELS.items() if e.kind != 'draft']\n"
        "print(sorted(m for m in sys.modules if m == 'torch' or m.startswith('vllm.models.')))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "['vllm.models.registry']", answer.stderr
