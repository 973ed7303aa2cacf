# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies and turns against transformers'."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.fixtures.forward import build_context
from vllm.attention.backends.cpu import CpuAttention
from vllm.attention.metadata import GroupMetadata
from vllm.config.shape_readers import ROPE_TYPES, read_decoder_shape
from vllm.errors import ConfigError
from vllm.layers import rotary
from vllm.layers.ops import cpu
from vllm.layers.rotary import get_rope, rope_parameters

HEAD_DIM = 64
BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8,
    "intermediate_size": 8,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
CASES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn-mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.3},
}


@pytest.mark.parametrize("case", CASES)
def test_turned_heads_equal_those_of_transformers(case: str) -> None:
    parameters = {"rope_theta": 500000.0, **CASES[case]}
    reference = LlamaRotaryEmbedding(LlamaConfig(**BASE, rope_parameters=parameters))
    rope = get_rope(build_context({**BASE, "rope_parameters": parameters}), HEAD_DIM)
    positions = torch.tensor([0, 1, 17, 1023, 1024, 4095])
    x = torch.randn(6, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    cos, sin = reference(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    fwd: Any = types.SimpleNamespace(positions=positions, derived={})
    torch.testing.assert_close(rope(x, fwd), expected[0], rtol=1e-5, atol=1e-5)


def test_angles_are_made_once_a_step() -> None:
    rope = get_rope(build_context(BASE), HEAD_DIM)
    fwd: Any = types.SimpleNamespace(positions=torch.arange(3), derived={})
    assert rope.cos_sin(fwd)[0] is rope.cos_sin(fwd)[0]


def test_both_spellings_of_config_json_give_the_same_parameters() -> None:
    old = {**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {**BASE, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    assert rope_parameters(old) == rope_parameters(new)


def test_an_unknown_type_is_refused_with_the_known_ones_before_any_layer_is_built() -> None:
    config = {**BASE, "rope_parameters": {"rope_type": "spiral"}}
    expected = r"rope_type to 'spiral'\n  why: supported: default, linear, llama3, yarn"
    with pytest.raises(ConfigError, match=expected):
        read_decoder_shape(config)
    ctx = dataclasses.replace(build_context(BASE), hf_config=config)
    with pytest.raises(ConfigError, match=expected):
        get_rope(ctx, HEAD_DIM)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_type_without_its_factor_is_refused_by_name(kind: str) -> None:
    config = {**BASE, "rope_parameters": {"rope_type": kind}}
    with pytest.raises(ConfigError, match=f"factor to None\n  why: rope_type {kind} needs"):
        read_decoder_shape(config)


def test_every_type_that_the_config_accepts_has_its_frequencies() -> None:
    numbers = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for kind in ROPE_TYPES:
        parameters = {"rope_type": kind, "original_max_position_embeddings": 64, **numbers}
        rope = get_rope(build_context({**BASE, "rope_parameters": parameters}), HEAD_DIM)
        assert rope.inv_freq.shape == (HEAD_DIM // 2,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 20, 64])
@pytest.mark.parametrize("head_norm", [False, True])
def test_the_cpp_kernel_stores_and_turns_like_the_plain_form(
    head_norm: bool, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu.has_kernels(dtype):
        pytest.skip("the kernels are not built here")
    torch.manual_seed(0)
    heads, kv_heads, num_tokens = 4, 2, 5
    rope = get_rope(build_context(BASE, dtype), head_dim)
    merged = torch.randn(num_tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    qk, v = merged[:, : heads + kv_heads], merged[:, heads + kv_heads :]
    norms = (*torch.randn(2, head_dim).to(dtype), 1e-5) if head_norm else None
    group = GroupMetadata(torch.zeros(1, 1), torch.tensor([8, 3, 30, 0, 31]))
    results = []
    for built in (True, False):
        monkeypatch.setattr(rotary.cpu, "has_kernels", lambda _, built=built: built)
        caches = torch.full((2, 4, 8, kv_heads, head_dim), -1.0, dtype=dtype)
        attn: Any = types.SimpleNamespace(
            group=0,
            num_heads=heads,
            num_kv_heads=kv_heads,
            k_cache=caches[0],
            v_cache=caches[1],
            k_rows=caches[0].flatten(0, 1),
            v_rows=caches[1].flatten(0, 1),
            impl=CpuAttention(),
        )
        fwd: Any = types.SimpleNamespace(
            positions=torch.tensor([0, 3, 100, 7, 9]), derived={}, groups=[group]
        )
        results.append((rope.turn_and_store(qk, v, attn, fwd, norms), caches))
    limit = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, **limit)
    # Rows that no slot names stay as they were.
    assert int((results[0][1] == -1.0).all(-1).all(-1).sum()) == 2 * (32 - num_tokens)
