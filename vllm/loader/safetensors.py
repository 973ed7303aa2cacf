# SPDX-License-Identifier: Apache-2.0
"""safetensors: one file, or shards with an index. Files are mapped, never read whole.

A tensor is a view of the mapping, so copying it into a parameter is the only copy, on the
device too, and a tensor-parallel rank touches only the pages of its own rows.
"""

from __future__ import annotations

import os

from safetensors import safe_open

from vllm.errors import ConfigError
from vllm.loader.source import NamedTensors, WeightSource
from vllm.preflight.files import inspect_directory


def safetensors_source(path: str) -> WeightSource:
    """The weights in directory `path`; ConfigError if files are missing or broken."""
    inventory = inspect_directory(path)
    if not inventory.complete:
        raise ConfigError(*inventory.findings)
    files = list(dict.fromkeys(info.file for info in inventory.tensors.values()))

    def tensors() -> NamedTensors:
        for file in files:
            with safe_open(os.path.join(path, file), framework="pt") as handle:
                for name in handle.offset_keys():
                    yield name, handle.get_tensor(name)

    return WeightSource(tuple(inventory.tensors), tensors)
