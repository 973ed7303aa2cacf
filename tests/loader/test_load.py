# SPDX-License-Identifier: Apache-2.0
"""Loading: formats agree, what is missing or misshapen is told, dummy weights repeat."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.forward import build_context, load_settings, load_tiny
from tests.fixtures.tiny_models import FAMILIES, TEXT_FAMILIES, tiny_checkpoint
from vllm.errors import ConfigError
from vllm.loader import load_model
from vllm.loader.dummy import dummy_source
from vllm.models.layouts import expected_tensors, optional_tensors
from vllm.preflight.files import compare_with_architecture, inspect_directory

PROMPT = [5, 6, 7, 8, 9]


def copy_of(family: str, path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint(family), path / family))


def config_of(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_names_exactly_the_tensors_of_a_real_checkpoint(family: str) -> None:
    path = tiny_checkpoint(family)
    config, inventory = config_of(path), inspect_directory(str(path))
    architecture = config["architectures"][0]
    expected = expected_tensors(config, architecture, inventory.tensors)
    optional = optional_tensors(config, architecture)
    assert compare_with_architecture(inventory, expected, optional, architecture) == []


def test_shards_with_an_index_load_like_one_file(tmp_path: Path) -> None:
    path = copy_of("qwen3", tmp_path)
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    weight_map = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, path / file)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expected = load_tiny(tiny_checkpoint("qwen3")).step({"a": PROMPT})["a"]
    torch.testing.assert_close(load_tiny(path).step({"a": PROMPT})["a"], expected, rtol=0, atol=0)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = copy_of("llama", tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError) as raised:
        load_tiny(path)
    (finding,) = raised.value.findings
    assert finding.code == "tensor-missing"
    assert finding.subject.startswith("1 of 29 tensors of LlamaForCausalLM")
    assert "model.layers.1.self_attn.k_proj.weight" in finding.why


def test_a_tensor_of_another_shape_is_told_with_both_shapes(tmp_path: Path) -> None:
    path = copy_of("llama", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model.norm.weight has shape \[65\].*makes it \[64\]"):
        load_tiny(path)


def test_a_truncated_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = copy_of("llama", tmp_path)
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-1])
    with pytest.raises(ConfigError, match="1 byte short"):
        load_tiny(path)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_dummy_weights_give_finite_logits_that_depend_only_on_the_seed(family: str) -> None:
    path = tiny_checkpoint(family)
    first = load_tiny(path, "dummy").step({"a": PROMPT})["a"]
    again = load_tiny(path, "dummy").step({"a": PROMPT})["a"]
    assert torch.isfinite(first).all()
    assert first.std() > 0.1
    torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_dummy_tensors_differ_by_name_and_seed() -> None:
    shapes = {"a.weight": (4, 4), "b.weight": (4, 4)}

    def draw(seed: int) -> dict[str, torch.Tensor]:
        return dict(dummy_source(shapes, seed, torch.float32, torch.device("cpu")).tensors())

    first, second = draw(0), draw(1)
    assert not torch.equal(first["a.weight"], first["b.weight"])
    assert not torch.equal(first["a.weight"], second["a.weight"])


def test_bfloat16_weights_load_into_a_float32_model(tmp_path: Path) -> None:
    path = copy_of("llama", tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({n: t.bfloat16() for n, t in tensors.items()}, path / "model.safetensors")
    config = config_of(path)
    model = load_model(load_settings(path, config), build_context(config))
    expected = tensors["model.embed_tokens.weight"].bfloat16().float()
    torch.testing.assert_close(model.embed_tokens.weight, expected, rtol=0, atol=0)
