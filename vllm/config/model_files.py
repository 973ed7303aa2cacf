# SPDX-License-Identifier: Apache-2.0
"""config.json, or what a GGUF file says in its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm.config.gguf_header import gguf_to_hf_config, read_gguf_header
from vllm.errors import ConfigError, Diagnostic

MAX_CONFIG_BYTES = 16 << 20
_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "inkling_mm_model": "InklingForConditionalGeneration",
    "inkling_text": "InklingForCausalLM",
    "inkling_model": "InklingForCausalLM",
}


def read_hf_config(path: str) -> dict[str, Any]:
    """The model's configuration. Raises `ConfigError` naming the file and the flaw."""
    if path.endswith(".gguf"):
        return gguf_to_hf_config(read_gguf_header(path), path)
    file = os.path.join(path, "config.json")
    if not os.path.exists(file):
        raise ConfigError(_no_config(path))
    return read_json_object(file)


def _no_config(path: str) -> Diagnostic:
    names = sorted(os.listdir(path))
    ggufs = [n for n in names if n.endswith(".gguf")]
    why = f"it holds {', '.join(names[:4])}" if names else "it is empty"
    if len(names) > 4:
        why += f" and {len(names) - 4} more"
    fix = "give the directory that holds config.json and the weights"
    if ggufs:
        fix = f"name the GGUF file itself: {os.path.join(path, ggufs[0])}"
    return Diagnostic("config-missing", f"there is no config.json in {path}", why=why, fix=fix)


def read_json_object(file: str) -> dict[str, Any]:
    """A file that must hold one JSON object."""
    fix = "restore it from the model's repository"
    try:
        if os.path.getsize(file) > MAX_CONFIG_BYTES:
            raise ValueError(f"it has {os.path.getsize(file):,} bytes")
        with open(file, "rb") as handle:
            text = handle.read()
        if text.startswith(b"version https://git-lfs"):
            fix = "run git lfs pull in the model directory"
            raise ValueError("it is a Git LFS pointer")
        return msgspec.json.decode(text, type=dict[str, Any])
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, RecursionError) as error:
        why = str(error)
    name = os.path.basename(file)
    code = "config-broken" if name == "config.json" else "json-broken"
    raise ConfigError(Diagnostic(code, f"{name} cannot be read", why=why, where=file, fix=fix))


def apply_overrides(hf_config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`--hf-overrides`: nested objects are merged, everything else is replaced."""
    result = dict(hf_config)
    for key, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = apply_overrides(result[key], value)
        else:
            result[key] = value
    return result


def text_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    """One level: the text model's fields of a nested configuration over the outer ones.

    The outer level names the architecture, the inner one the sizes. Inkling's reader knows
    its own nesting and gets the file as it is.
    """
    inner = hf_config.get("text_config")
    if str(hf_config.get("model_type", "")).startswith("inkling") or inner is None:
        return hf_config
    if not isinstance(inner, Mapping):
        raise ConfigError(
            Diagnostic(
                "config-value",
                "config.json's text_config is not an object",
                fix="restore config.json from the model's repository",
            )
        )
    outer = {k: v for k, v in hf_config.items() if k != "text_config"}
    names = hf_config.get("architectures") or inner.get("architectures")
    return {**outer, **inner, **({"architectures": names} if names else {})}


def architectures_of(hf_config: Mapping[str, Any], path: str) -> list[str]:
    """`architectures`. Raises `ConfigError` if the key is absent, empty or no list of names."""
    names = hf_config.get("architectures")
    if isinstance(names, list) and names and all(isinstance(n, str) and n for n in names):
        return names
    likely = _BY_MODEL_TYPE.get(str(hf_config.get("model_type")))
    example = likely or "LlamaForCausalLM"
    state = "has no architectures" if names is None else f"sets architectures to {str(names)[:60]}"
    raise ConfigError(
        Diagnostic(
            "architecture-missing",
            f"config.json {state}",
            why="the engine cannot tell what model this is"
            + (f"; its model_type suggests {likely}" if likely else ""),
            where=os.path.join(path, "config.json"),
            fix=f"""--hf-overrides '{{"architectures": ["{example}"]}}'""",
        )
    )
