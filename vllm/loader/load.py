# SPDX-License-Identifier: Apache-2.0
"""Builds a model and fills it: chooses the format, checks that every tensor came."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.errors import ConfigError, Diagnostic
from vllm.layers.context import BuildContext
from vllm.loader.dummy import dummy_source
from vllm.loader.gguf import gguf_source
from vllm.loader.safetensors import safetensors_source
from vllm.loader.source import NamedTensors, WeightSource, with_progress
from vllm.logger import init_logger
from vllm.models.layouts import Shapes, expected_tensors
from vllm.models.registry import load_model_class

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

logger = init_logger(__name__)

_EXAMPLES = 3


def load_model(vllm_config: VllmConfig, ctx: BuildContext) -> nn.Module:
    """The model with its weights on `ctx.device`, ready to run.

    Raises `ConfigError` if files are broken, tensors are missing or have another shape.
    """
    started_s = time.monotonic()
    architecture = vllm_config.model_config.architecture
    source = open_source(vllm_config, ctx)
    drafts = ctx.num_draft_tokens > 0
    shapes = expected_tensors(ctx.hf_config, architecture, source.names, drafts)
    with torch.inference_mode():
        model = load_model_class(architecture, ctx.requested_backend)(ctx)
        shown = vllm_config.load_config.use_tqdm_on_load and ctx.tp.rank == 0
        fill(model, with_progress(source, shown), shapes, architecture)
        finish_loading(model)
    logger.info("Loaded weights in %.1f s", time.monotonic() - started_s)
    return model.eval()


def open_source(vllm_config: VllmConfig, ctx: BuildContext) -> WeightSource:
    """The checkpoint in the format that the user asked for or that the path shows."""
    model_config, load_format = vllm_config.model_config, vllm_config.load_config.load_format
    if load_format == "dummy":
        drafts = ctx.num_draft_tokens > 0
        shapes = expected_tensors(ctx.hf_config, model_config.architecture, with_draft_head=drafts)
        return dummy_source(shapes, model_config.seed, ctx.dtype, ctx.device)
    if load_format == "gguf" or model_config.is_gguf:
        return gguf_source(
            model_config.model_path, ctx.hf_config, model_config.architecture, ctx.dtype
        )
    return safetensors_source(model_config.model_path)


def fill(model: nn.Module, weights: NamedTensors, shapes: Shapes, architecture: str) -> None:
    """Pass `weights` to the model; ConfigError at a wrong shape or if one never comes."""
    seen: set[str] = set()
    model.load_weights(_checked(weights, shapes, seen))  # type: ignore[operator]
    missing = sorted(shapes.keys() - seen)
    if missing:
        raise ConfigError(
            Diagnostic(
                "tensor-missing",
                f"{len(missing)} of {len(shapes)} tensors of {architecture} are not in the weights",
                why=f"such as {', '.join(missing[:_EXAMPLES])}",
                fix="check that config.json and the weights are of one model and complete",
            )
        )


def _checked(weights: NamedTensors, shapes: Shapes, seen: set[str]) -> NamedTensors:
    """The same tensors, their shapes compared and their names added to `seen`."""
    for name, tensor in weights:
        seen.add(name)
        shape = shapes.get(name, tuple(tensor.shape))
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                Diagnostic(
                    "tensor-shape",
                    f"{name} has shape {list(tensor.shape)}, config.json makes it {list(shape)}",
                    fix="check that config.json and the weights are of one model",
                )
            )
        yield name, tensor


def finish_loading(model: nn.Module) -> None:
    """Let every module bring its weights into the form that it computes with."""
    for module in model.modules():
        process = getattr(module, "process_weights_after_loading", None)
        if process is not None:
            process()
