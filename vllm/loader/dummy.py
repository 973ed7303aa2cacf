# SPDX-License-Identifier: Apache-2.0
"""Random weights of the right names and shapes, for tests and for measuring without files.

Each tensor depends only on the seed and its name, so that a model is the same however it
is divided over ranks.
"""

from __future__ import annotations

import zlib

import torch

from vllm.loader.source import NamedTensors, WeightSource
from vllm.models.layouts import Shapes


def dummy_source(
    shapes: Shapes, seed: int | None, dtype: torch.dtype, device: torch.device
) -> WeightSource:
    """Tensors of `shapes`, drawn on `device`."""

    def tensors() -> NamedTensors:
        generator = torch.Generator(device=device)
        for name, shape in shapes.items():
            generator.manual_seed(zlib.crc32(f"{seed or 0}:{name}".encode()))
            yield name, _draw(name, shape, dtype, generator)

    return WeightSource(tuple(shapes), tensors)


def _draw(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Ones for scales; else normal with variance 1 / inputs, which keeps activations in range."""
    if name.endswith(("norm.weight", "layernorm.weight", "global_scale")):
        return torch.ones(shape, dtype=dtype, device=generator.device)
    values = torch.empty(shape, dtype=dtype, device=generator.device)
    return values.normal_(std=shape[-1] ** -0.5, generator=generator)
