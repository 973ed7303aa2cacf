# SPDX-License-Identifier: Apache-2.0
"""The model: its files, architecture, number format and context length."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from vllm import platforms
from vllm.config import quantization as quant
from vllm.config.fields import check_values, derived, option, raise_usage, wrong_value
from vllm.config.hub import EMBEDDED_NAME, resolve_model
from vllm.config.model_files import apply_overrides, architectures_of, read_hf_config, text_config
from vllm.config.shape import ModelShape
from vllm.errors import Diagnostic, error_from
from vllm.logger import init_logger
from vllm.models import registry
from vllm.platforms import Platform

logger = init_logger(__name__)

DTYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass
class ModelConfig:
    """Model."""

    model: str = ""
    """Directory, GGUF file or hub id; empty: the embedded SmolLM2-135M-Instruct."""
    tokenizer: str | None = None
    """Directory or hub id of the tokenizer; unset: the model's own."""
    tokenizer_mode: str = option("auto", choices=("auto", "hf", "inkling"))
    """auto: what the model needs; hf: tokenizer.json and a chat template; inkling: its renderer."""
    trust_remote_code: bool = False
    """Allow Python code in the model's repository (tokenizers that have no tokenizer.json)."""
    dtype: str = option("auto", choices=tuple(DTYPES))
    """Number format of weights and activations; auto: the checkpoint's, where it can run."""
    seed: int = 0
    """Seed of requests that bring none, and of dummy weights."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    max_model_len: int | None = option(None, minimum=1)
    """Longest sequence, prompt and output; unset: the model's own limit. 8K means 8,192."""
    quantization: str | None = option(None, aliases=("-q",))
    """Format of the weights; unset: what the checkpoint says."""
    enforce_eager: bool = False
    """Launch every kernel by itself, without CUDA graphs."""
    max_logprobs: int = option(20, minimum=0)
    """Most log-probabilities a position that a request may ask for."""
    served_model_name: list[str] | None = option(None)
    """Names under which clients find the model; unset: what was given as the model."""
    hf_overrides: dict[str, Any] = option({})
    """Keys of config.json to replace, as JSON."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts and outputs are token ids."""
    generation_config: str = "auto"
    """Source of default sampling parameters: auto (the model's file), vllm (none), a directory."""

    attention_backend: dataclasses.InitVar[str | None] = None
    num_devices: dataclasses.InitVar[int] = 1
    platform: dataclasses.InitVar[type[Platform] | None] = None
    download_dir: dataclasses.InitVar[str | None] = None
    findings: dataclasses.InitVar[list[Diagnostic] | None] = None

    model_path: str = derived("")
    is_gguf: bool = derived(False)
    hf_config: dict[str, Any] = derived()
    architecture: str = derived("")
    shape: ModelShape = derived()
    resolved_dtype: str = derived("")
    eos_token_ids: list[int] = derived()

    def __post_init__(
        self,
        attention_backend: str | None,
        num_devices: int,
        platform: type[Platform] | None,
        download_dir: str | None,
        findings: list[Diagnostic] | None,
    ) -> None:
        """Resolve and check.

        What makes later checks meaningless is raised at once; the rest goes to `findings`,
        or is raised together where nobody collects.
        """
        raise_usage(check_values(self))
        platform = platform or platforms.current_platform
        self._read_files(download_dir)
        entry = registry.resolve(architectures_of(self.hf_config, self.model_path))
        self.architecture = entry.architecture
        logger.info("Resolved architecture: %s", self.architecture)
        platform.verify_model_arch(self.architecture, attention_backend, num_devices)
        collected: list[Diagnostic] = []
        self.shape = registry.load_shape_reader(entry)(self.hf_config)
        collected += self._resolve_dtype(platform)
        collected += quant.check_quantization(self, platform)
        collected += self._resolve_length()
        self.eos_token_ids = _eos_token_ids(self.hf_config, self.model_path)
        if findings is not None:
            findings += collected
        elif any(d.severity == "error" for d in collected):
            raise error_from(collected)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a value."""
        return DTYPE_BYTES[self.resolved_dtype]

    @property
    def served_names(self) -> list[str]:
        """Names under which clients find the model, the preferred one first."""
        return self.served_model_name or [self.model or EMBEDDED_NAME]

    @property
    def tokenizer_path(self) -> str:
        """Directory or GGUF file that the tokenizer is read from."""
        if self.tokenizer in (None, self.model):
            return self.model_path
        return resolve_model(str(self.tokenizer), None, None)

    @property
    def uses_inkling_renderer(self) -> bool:
        """Whether prompts are rendered and parsed in Inkling's way."""
        automatic = self.tokenizer_mode == "auto" and self.architecture.startswith("Inkling")
        return self.tokenizer_mode == "inkling" or automatic

    def default_sampling_params(self) -> dict[str, Any]:
        """Sampling defaults that the model's authors give (generation_config.json)."""
        if self.generation_config == "vllm" or self.is_gguf:
            return {}
        auto = self.generation_config == "auto"
        return sampling_defaults(self.model_path if auto else self.generation_config)

    def _read_files(self, download_dir: str | None) -> None:
        self.model_path = resolve_model(self.model, self.revision, download_dir)
        self.is_gguf = self.model_path.endswith(".gguf")
        raw = read_hf_config(self.model_path)
        self.hf_config = text_config(apply_overrides(raw, self.hf_overrides))

    def _resolve_dtype(self, platform: type[Platform]) -> list[Diagnostic]:
        wanted = DTYPES[self.dtype]
        stored = str(self.hf_config.get("dtype", self.hf_config.get("torch_dtype", "float32")))
        stored = stored.removeprefix("torch.")
        if wanted != "auto":
            self.resolved_dtype = wanted
            return quant.check_dtype(self, stored, platform)
        self.resolved_dtype = quant.automatic_dtype(stored, platform, self.is_gguf)
        return []

    def _resolve_length(self) -> list[Diagnostic]:
        limit = self.shape.max_position_embeddings
        if self.max_model_len is None:
            self.max_model_len = limit
        if self.max_model_len <= limit:
            return []
        return [
            Diagnostic(
                "max-model-len",
                f"--max-model-len {self.max_model_len:,} is beyond the model's {limit:,} positions",
                why="config.json's max_position_embeddings and rope scaling give that limit",
                fix=f"--max-model-len {limit}, or set rope scaling with --hf-overrides",
            )
        ]


def sampling_defaults(directory: str) -> dict[str, Any]:
    """The sampling parameters in a directory's generation_config.json."""
    from vllm.config.model_files import read_json_object

    file = os.path.join(directory, "generation_config.json")
    if not os.path.exists(file):
        return {}
    names = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    content = read_json_object(file)
    if content.get("do_sample") is False:
        return {}
    values = {k: v for k, v in content.items() if k in names and v is not None}
    if isinstance(content.get("max_new_tokens"), int):
        values["max_tokens"] = content["max_new_tokens"]
    return values


def _eos_token_ids(hf_config: dict[str, Any], path: str) -> list[int]:
    """Ids that end a sequence: config.json's and those of generation_config.json."""
    found: list[int] = []
    values = [hf_config.get("eos_token_id")]
    file = os.path.join(path, "generation_config.json")
    if os.path.exists(file):
        from vllm.config.model_files import read_json_object

        values.append(read_json_object(file).get("eos_token_id"))
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if type(item) is int and item not in found:
                found.append(item)
    return found


def parse_length(text: str) -> int:
    """`--max-model-len`: 8192, 8k (8,000), 8K (8,192), 1m, 1M. Raises `UsageError`."""
    factors = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}
    factor = factors.get(text[-1:], 1)
    digits = text[:-1] if factor > 1 else text
    try:
        return int(float(digits) * factor) if factor > 1 else int(digits)
    except (ValueError, OverflowError):
        raise_usage([wrong_value("--max-model-len", text, "a number such as 8192, 8k or 8K")])
        raise AssertionError from None
