# SPDX-License-Identifier: Apache-2.0
"""The tensors that will be loaded: from files' headers, or from the architecture alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.config.gguf_header import read_gguf_header
from vllm.config.hub import download_weights, is_offline
from vllm.errors import ConfigError, Diagnostic, ExitCode, VLLMError
from vllm.models.layouts import expected_tensors, gguf_names, optional_tensors
from vllm.preflight.files import (
    WeightInventory,
    compare_with_architecture,
    inspect_directory,
    lacks_files,
)
from vllm.preflight.memory import expected_tensor_infos
from vllm.preflight.safetensors_header import TensorInfo

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

Tensors = Mapping[str, TensorInfo]


def check_weights(config: VllmConfig, findings: list[Diagnostic]) -> Tensors | None:
    """Tensors that will be loaded, by name; None where they cannot be told."""
    model, load_format = config.model_config, config.load_config.load_format
    if load_format == "dummy":
        return architecture_tensors(config)
    if model.is_gguf:
        return _gguf_tensors(config, findings)
    if load_format == "gguf":
        findings.append(_not_gguf(model.model_path))
        return None
    inventory = inspect_directory(model.model_path)
    findings += inventory.findings
    if any(d.code == "quantization-unsupported" for d in config.findings):
        return None
    if not inventory.complete:
        return None
    architecture, hf_config = model.architecture, model.hf_config
    with_mtp = config.speculative_config is not None
    expected = expected_tensors(hf_config, architecture, inventory.tensors, with_mtp)
    optional = optional_tensors(hf_config, architecture)
    findings += compare_with_architecture(inventory, expected, optional, architecture)
    return {n: t for n, t in inventory.tensors.items() if n in expected}


def architecture_tensors(config: VllmConfig) -> Tensors:
    """What the architecture loads with this config.json, in the model's number format."""
    model = config.model_config
    with_mtp = config.speculative_config is not None
    shapes = expected_tensors(model.hf_config, model.architecture, with_draft_head=with_mtp)
    return {t.name: t for t in expected_tensor_infos(shapes, model.dtype_bytes)}


def is_on_hub(config: VllmConfig) -> bool:
    """Whether weights have to be downloaded: a hub id of which not every file is cached."""
    model = config.model_config
    if not model.model or model.is_gguf or config.load_config.load_format in ("dummy", "gguf"):
        return False
    if os.path.isdir(os.path.expanduser(model.model)) or is_offline():
        return False
    return lacks_files(model.model_path)


def fetch(config: VllmConfig) -> list[Diagnostic]:
    """Download the weights of a hub id; what is wrong with that, or with them."""
    model = config.model_config
    findings: list[Diagnostic] = []
    try:
        download_weights(model.model, model.revision, config.load_config.download_dir)
    except VLLMError as error:
        return list(error.findings)
    check_weights(config, findings)
    return findings


def not_cached(config: VllmConfig) -> Diagnostic:
    """What a look ahead without a download cannot tell."""
    model = config.model_config.model
    return Diagnostic(
        "weights-not-cached",
        f"the weights of {model} are not in the hub cache; vllm serve will download them",
        why="the plan is made from config.json alone, the files are not checked",
        fix=f"hf download {model} fetches them beforehand",
        severity="info",
    )


def _not_gguf(path: str) -> Diagnostic:
    return Diagnostic(
        "load-format",
        "--load-format gguf needs a GGUF file",
        why=f"{path} is a directory",
        fix="name the .gguf file, or leave --load-format out",
        exit_code=ExitCode.USAGE,
    )


def _gguf_tensors(config: VllmConfig, findings: list[Diagnostic]) -> Tensors | None:
    """A GGUF file's tensors under the names that the architecture knows."""
    model = config.model_config
    try:
        header = read_gguf_header(model.model_path)
    except ConfigError as error:
        findings += error.findings
        return None
    inventory, file = WeightInventory(num_files=1), os.path.basename(model.model_path)
    for name, (kind, shape) in header.tensors.items():
        names = gguf_names(name, model.architecture, model.hf_config)
        # Experts lie in one tensor, as its slices.
        stacked = "_exps." in name and shape[:1] == (len(names),)
        for known in names:
            inventory.tensors[known] = TensorInfo(
                known, kind, shape[1:] if stacked else shape, 0, file
            )
    expected = expected_tensors(model.hf_config, model.architecture)
    optional = optional_tensors(model.hf_config, model.architecture)
    findings += compare_with_architecture(
        inventory, expected, optional, model.architecture, "the file's metadata"
    )
    return {n: t for n, t in inventory.tensors.items() if n in expected}
