# SPDX-License-Identifier: Apache-2.0
"""Which architectures the engine serves. Static entries: resolving imports no model."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Sequence
from typing import Any, Literal

from vllm import platforms
from vllm.errors import ConfigError, Diagnostic

Kind = Literal["text", "multimodal", "draft"]


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """One architecture of config.json."""

    architecture: str
    module: str
    class_name: str
    kind: Kind = "text"
    example: str = ""
    """A public checkpoint, for the documentation."""
    shape_reader: str = "vllm.config.shape_readers:read_decoder_shape"
    """module:function that turns config.json into a `ModelShape`."""


def _entry(architecture: str, module: str, example: str, **more: Any) -> ModelEntry:
    return ModelEntry(
        architecture,
        f"vllm.models.{module}",
        more.pop("class_name", architecture),
        example=example,
        **more,
    )


_INKLING_SHAPE = "vllm.models.inkling.configs:read_shape"

MODELS: dict[str, ModelEntry] = {
    e.architecture: e
    for e in (
        _entry("LlamaForCausalLM", "llama", "meta-llama/Llama-3.1-8B-Instruct"),
        _entry(
            "MistralForCausalLM",
            "llama",
            "mistralai/Mistral-7B-Instruct-v0.3",
            class_name="LlamaForCausalLM",
        ),
        _entry("Qwen2ForCausalLM", "qwen2", "Qwen/Qwen2.5-7B-Instruct"),
        _entry("Qwen3ForCausalLM", "qwen3", "Qwen/Qwen3-8B"),
        _entry("Qwen3MoeForCausalLM", "qwen3_moe", "Qwen/Qwen3-30B-A3B"),
        _entry("MixtralForCausalLM", "mixtral", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        _entry("InklingForCausalLM", "inkling", "a text-only Inkling", shape_reader=_INKLING_SHAPE),
        _entry(
            "InklingForConditionalGeneration",
            "inkling",
            "thinkingmachines/Inkling-Small",
            kind="multimodal",
            shape_reader=_INKLING_SHAPE,
        ),
        _entry(
            "InklingMTPModel",
            "inkling",
            "part of the Inkling checkpoints",
            kind="draft",
            shape_reader=_INKLING_SHAPE,
        ),
    )
}

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""`general.architecture` of a GGUF file to ours."""

_NOT_SERVABLE = (
    ("ForSequenceClassification", "it classifies, it does not generate text"),
    ("ForTokenClassification", "it classifies, it does not generate text"),
    ("ForMaskedLM", "it is an encoder, it does not generate text"),
    ("ForQuestionAnswering", "it extracts answers, it does not generate text"),
    ("BertModel", "it is an encoder, it does not generate text"),
    ("T5ForConditionalGeneration", "encoder-decoder models are not served"),
    ("BartForConditionalGeneration", "encoder-decoder models are not served"),
    ("WhisperForConditionalGeneration", "encoder-decoder models are not served"),
)


def resolve(architectures: Sequence[str]) -> ModelEntry:
    """The first architecture that the engine serves.

    Raises `ConfigError` with the nearest names if there is none.
    """
    for name in architectures:
        entry = MODELS.get(name)
        if entry is not None and entry.kind != "draft":
            return entry
    raise ConfigError(_unknown(architectures[0]))


def _unknown(name: str) -> Diagnostic:
    entry = MODELS.get(name)
    if entry is not None:
        return Diagnostic(
            "architecture-not-servable",
            f"{name} cannot be served by itself",
            why="it is a draft head, which proposes tokens for another model",
            fix='serve the whole checkpoint with --speculative-config \'{"method": "mtp"}\'',
        )
    for suffix, why in _NOT_SERVABLE:
        if name.endswith(suffix):
            return Diagnostic(
                "architecture-not-servable",
                f"{name} cannot be served",
                why=why,
                fix="a model that generates text, see docs/models/supported_models.md",
            )
    servable = [e.architecture for e in MODELS.values() if e.kind != "draft"]
    near = difflib.get_close_matches(name, servable, n=3, cutoff=0.6)
    known = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(servable)}"
    return Diagnostic(
        "architecture-unknown",
        f"the architecture {name} is not known",
        why=known,
        fix="correct `architectures` in config.json, or serve one of the known architectures",
        see="docs/models/supported_models.md",
    )


def load_model_class(architecture: str, attention_backend: str | None = None) -> type[Any]:
    """Import the model's class. The hardware is checked once more for models that are built
    without a `ModelConfig`, as that has checked it already."""
    platforms.current_platform.verify_model_arch(architecture, attention_backend)
    entry = MODELS[architecture]
    return getattr(importlib.import_module(entry.module), entry.class_name)


def load_shape_reader(entry: ModelEntry) -> Any:
    """The torch-free function that reads this architecture's config.json."""
    module, _, function = entry.shape_reader.partition(":")
    return getattr(importlib.import_module(module), function)
