# SPDX-License-Identifier: Apache-2.0
"""A caller's prompt and options to what the core runs: checked, tokenized, fanned out.

Everything that can be refused is refused here, before any other request could notice.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from vllm.engine.messages import EngineCoreRequest
from vllm.errors import RequestError
from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.tokenizers import Tokenizer


class PromptDict(TypedDict, total=False):
    """A prompt with its options: one of the first two, and perhaps `cache_salt`."""

    prompt: str | None
    prompt_token_ids: list[int]
    cache_salt: str | None


Prompt = str | Sequence[int] | PromptDict
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclasses.dataclass
class ProcessedRequest:
    """A request that has passed every check."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    sequences: list[EngineCoreRequest]
    """`n` of them; with n = 1 under the request's own id."""


class InputProcessor:
    """Checks requests against the model and gives them the core's form."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: Tokenizer | None) -> None:
        model_config = vllm_config.model_config
        self.tokenizer = tokenizer
        self.vocab_size: int = model_config.shape.vocab_size
        assert model_config.max_model_len is not None
        self.max_model_len: int = model_config.max_model_len
        self._max_logprobs = model_config.max_logprobs
        ids = list(model_config.eos_token_ids)
        for role in ("eos_token", "eot_token"):
            token_id = tokenizer.id_of(role) if tokenizer else None
            if token_id is not None and token_id not in ids:
                ids.append(token_id)
        self.eos_token_ids = [i for i in ids if i < self.vocab_size]

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        arrival_time: float | None = None,
    ) -> ProcessedRequest:
        """Check and convert one request. Raises `RequestError` naming the field."""
        text, token_ids, cache_salt = self.tokenize(prompt, add_special_tokens)
        self.check_tokens(token_ids)
        arrival = time.monotonic() if arrival_time is None else arrival_time
        params = self.resolve_params(params)
        sequences = [
            EngineCoreRequest(
                request_id if params.n == 1 else f"{index}_{request_id}",
                token_ids,
                _of_sequence(params, index),
                arrival,
                priority,
                cache_salt,
            )
            for index in range(params.n)
        ]
        return ProcessedRequest(request_id, text, token_ids, params, arrival, sequences)

    def tokenize(
        self, prompt: Prompt, add_special_tokens: bool = True
    ) -> tuple[str | None, list[int], str | None]:
        """(text if there is one, token ids, cache salt) of a prompt."""
        salt = None
        if isinstance(prompt, Mapping):
            content: Mapping[str, Any] = prompt
            unknown = set(content) - _PROMPT_KEYS
            if unknown:
                raise RequestError(_unknown_keys(unknown), "prompt")
            salt = content.get("cache_salt")
            text, token_ids = content.get("prompt"), content.get("prompt_token_ids")
            if token_ids is not None:
                return text, _checked_list(token_ids), salt
            prompt = text  # type: ignore[assignment]
        if not isinstance(prompt, str):
            return None, _checked_list(prompt), salt
        if self.tokenizer is None:
            raise RequestError("no tokenizer was loaded: the prompt must be token ids", "prompt")
        return prompt, self.tokenizer.encode(prompt, add_special_tokens), salt

    def check_tokens(self, token_ids: list[int]) -> None:
        """Refuse prompts that are empty, too long or outside the vocabulary."""
        if not token_ids:
            raise RequestError("the prompt is empty", "prompt")
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; with room for one new token at most "
                f"{self.max_model_len - 1} fit the context of {self.max_model_len}",
                "prompt",
                "context-length-exceeded",
            )
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"the prompt holds token id {token_id}, "
                    f"the vocabulary is 0 to {self.vocab_size - 1}",
                    "prompt",
                )

    def resolve_params(self, params: SamplingParams) -> SamplingParams:
        """Check `params` against the model; fill in what only the model knows."""
        params.check_vocab(self.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self._max_logprobs:
                raise RequestError(
                    f"{name} is {count}, this server gives at most {self._max_logprobs}", name
                )
        changes: dict[str, Any] = {"eos_token_ids": self.eos_token_ids}
        if params.bad_words:
            changes["bad_words_token_ids"] = self._bad_words(params.bad_words)
        if self.tokenizer is None:
            if params.stop_strings:
                raise RequestError("no tokenizer was loaded: stop strings cannot be found", "stop")
            changes["detokenize"] = False
        return params.clone(**changes)

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Ids of each word, at the start of a text and, where that differs, after a space."""
        if self.tokenizer is None:
            raise RequestError("no tokenizer was loaded: give token ids instead", "bad_words")
        found: list[list[int]] = []
        for word in words:
            bare = self.tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            if bare:
                found.append(bare)
            if spaced and (not bare or spaced[0] != bare[0]):
                found.append(spaced)
        return found


def _of_sequence(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of `n`: each has a seed of its own."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else params.seed + index
    return params.clone(n=1, seed=seed)


def _checked_list(token_ids: Any) -> list[int]:
    if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
        kind = type(token_ids).__name__
        raise RequestError(f"the prompt must be a string or token ids, got {kind}", "prompt")
    if not all(type(token_id) is int for token_id in token_ids):
        raise RequestError("the prompt's token ids must be integers", "prompt")
    return list(token_ids)


def _unknown_keys(unknown: set[Any]) -> str:
    names = ", ".join(sorted(map(str, unknown))[:5])
    if any(str(key).startswith(("multi_modal", "mm_")) for key in unknown):
        return f"images and audio cannot be taken: this engine serves text ({names})"
    return f"a prompt takes prompt, prompt_token_ids and cache_salt, not {names}"
