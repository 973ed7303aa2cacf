# SPDX-License-Identifier: Apache-2.0
"""How the tokens of one request are chosen: names and meanings as in vLLM."""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

from vllm.errors import RequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 32
MAX_BIAS_ENTRIES = 1024
_MAX_STOP_CHARS = 1024


class RequestOutputKind(enum.IntEnum):
    """What a caller is handed while a request runs."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A constraint on the output text; exactly one field is set."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingParams(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, dict=True
):
    """Sampling options of one request.

    Construction checks every value that needs no model; `check_vocab` does the
    rest once the model is known. Raises `RequestError` naming the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    bad_words_token_ids: list[list[int]] | None = None
    """Filled by the input processor from `bad_words`."""
    eos_token_ids: list[int] | None = None
    """Filled by the input processor: ids that end the text unless `ignore_eos`."""

    def __post_init__(self) -> None:
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop_token_ids = self.stop_token_ids or []
        self._check_numbers()
        self._check_lists()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-5

    @property
    def stop_strings(self) -> list[str]:
        """`stop` in its normal form."""
        assert isinstance(self.stop, list)
        return self.stop

    def _check_numbers(self) -> None:
        _in_range("n", self.n, 1, MAX_N, integer=True)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _above_zero("repetition_penalty", self.repetition_penalty)
        _in_range("temperature", self.temperature, 0.0, 1e6)
        _above_zero("top_p", self.top_p)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("top_k", self.top_k, -1, 2**31 - 1, integer=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), 2**63 - 1, integer=True)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1, integer=True)
        _in_range("min_tokens", self.min_tokens, 0, 2**31 - 1, integer=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _in_range(name, value, 0, MAX_LOGPROBS, integer=True)
        if self.greedy and self.n > 1:
            raise RequestError(f"n must be 1 with temperature 0, got {self.n}", "n")

    def _check_lists(self) -> None:
        stop = self.stop_strings
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop holds {len(stop)} strings, at most {MAX_STOP_STRINGS} are allowed", "stop"
            )
        if any(not isinstance(s, str) or not s for s in stop):
            raise RequestError("stop must hold non-empty strings", "stop")
        if any(len(s) > _MAX_STOP_CHARS for s in stop):
            raise RequestError(f"a stop string is longer than {_MAX_STOP_CHARS} characters", "stop")
        if stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", "stop")
        for name in ("stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias"):
            entries = getattr(self, name)
            limit = 2**20 if name == "allowed_token_ids" else MAX_BIAS_ENTRIES
            if entries and len(entries) > limit:
                raise RequestError(f"{name} holds {len(entries)} entries, at most {limit}", name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty", "allowed_token_ids")
        if any(not w for w in self.bad_words or ()):
            raise RequestError("bad_words must hold non-empty strings", "bad_words")
        for token, bias in (self.logit_bias or {}).items():
            if not math.isfinite(bias) or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias of token {token} must be between -100 and 100, got {bias}",
                    "logit_bias",
                )

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse token ids outside [0, vocab_size). Raises `RequestError`."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                if not 0 <= token < vocab_size:
                    raise RequestError(
                        f"{name} holds token id {token}, the vocabulary ends at {vocab_size - 1}",
                        name,
                    )

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields replaced, checked again."""
        return msgspec.structs.replace(self, **changes)


def _in_range(name: str, value: float, low: float, high: float, *, integer: bool = False) -> None:
    kind: tuple[type, ...] = (int,) if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind):
        noun = "an integer" if integer else "a number"
        raise RequestError(f"{name} must be {noun}, got {value!r}", name)
    if not low <= value <= high:  # NaN fails this too
        raise RequestError(f"{name} must be between {low:g} and {high:g}, got {value}", name)


def _above_zero(name: str, value: float) -> None:
    _in_range(name, value, -math.inf, math.inf)
    if not (value > 0 and math.isfinite(value)):
        raise RequestError(f"{name} must be above 0, got {value}", name)
