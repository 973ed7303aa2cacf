# SPDX-License-Identifier: Apache-2.0
"""What both generating endpoints share: names, limits, tokenizing, log-probabilities."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.engine.async_llm import AsyncLLM
from vllm.engine.input_processor import ProcessedRequest
from vllm.entrypoints.chat import inkling_renderer, uses_inkling
from vllm.entrypoints.openai.http import HttpError
from vllm.entrypoints.openai.protocol import SamplingRequest
from vllm.errors import EngineDeadError, RequestError
from vllm.logger import init_logger
from vllm.outputs import Logprob, PromptLogprobs, RequestOutput
from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.frontend import FrontendConfig
    from vllm.tokenizers import Tokenizer

logger = init_logger(__name__)

T = TypeVar("T")
MAX_SEQUENCES = 2048
"""Prompts times `n` in one HTTP request."""
_LONG_TEXT_CHARS = 20_000
_LOWEST_LOGPROB = -9999.0


class ServedModel:
    """The engine and everything about its model that requests are checked against."""

    def __init__(
        self,
        engine: AsyncLLM,
        vllm_config: VllmConfig,
        frontend: FrontendConfig,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.engine = engine
        self.config = vllm_config
        self.frontend = frontend
        self.tokenizer = tokenizer
        self.inkling = uses_inkling(tokenizer, vllm_config.model_config)
        if self.inkling and tokenizer is not None:
            inkling_renderer(tokenizer)  # a tokenizer without its tokens is refused now
        self.names = vllm_config.model_config.served_names
        self.defaults = vllm_config.model_config.default_sampling_params()
        self.default_max_tokens: int | None = self.defaults.pop("max_tokens", None)
        assert vllm_config.model_config.max_model_len is not None
        self.max_model_len: int = vllm_config.model_config.max_model_len
        # Token ids as JSON take up to 8 characters each, text rarely more than 8 a token.
        self.max_body_bytes = max(1 << 20, 16 * self.max_model_len)
        self.ready = False

    def check_ready(self) -> None:
        """Raise `EngineDeadError` after the engine died, `HttpError` 503 while it loads."""
        if self.engine.client.death is not None:
            raise EngineDeadError(str(self.engine.client.death))
        if not self.ready:
            raise HttpError(503, "the engine is still loading the model", code="engine-loading")

    def check_name(self, name: str | None) -> str:
        """The name to answer with. Raises `HttpError` 404 for one that is not served."""
        if name in (None, ""):
            return self.names[0]
        if name not in self.names:
            raise HttpError(
                404,
                f"the model {name[:100]!r} does not exist; served: {', '.join(self.names)}",
                "model",
                "model_not_found",
            )
        return str(name)

    async def in_thread(self, work: Callable[..., T], size: int, *arguments: Any) -> T:
        """Run `work` here if its input is short, else beside the loop (encoding frees the GIL)."""
        if size < _LONG_TEXT_CHARS:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)

    def sampling_params(
        self, body: SamplingRequest, num_prompt_tokens: int, max_tokens: int | None, logprobs: Any
    ) -> SamplingParams:
        """Parameters with defaults and limits filled in. Raises `RequestError`."""
        room = self.max_model_len - num_prompt_tokens
        if max_tokens is not None and max_tokens > room > 0:
            raise RequestError(
                f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} are more than "
                f"the context of {self.max_model_len}",
                "max_tokens",
                "context-length-exceeded",
            )
        if max_tokens is None and room > 0:
            max_tokens = min(room, self.default_max_tokens or room)
        return body.sampling_params(self.defaults, max_tokens=max_tokens, logprobs=logprobs)

    def log_request(self, request: ProcessedRequest) -> None:
        """With --enable-log-requests: one line a request."""
        if self.frontend.enable_log_requests:
            logger.info(
                "Request %s: %d prompt tokens, %s",
                request.request_id,
                len(request.prompt_token_ids),
                request.sampling_params,
            )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, special ones included."""
        return self.tokenizer.token_bytes(False)[token_id] if self.tokenizer else b""


def check_stream_options(body: SamplingRequest) -> bool:
    """Whether a stream ends with the usage. Raises `RequestError` without a stream."""
    options = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise RequestError("stream_options needs stream=true", "stream_options")
    return bool(options.include_usage)


def new_id(prefix: str, body: SamplingRequest, header: str | None) -> str:
    """An id for a request: the client's own if it gave one."""
    return f"{prefix}-{body.request_id or header or uuid.uuid4().hex}"


def usage_of(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    num_cached_tokens: int | None,
    num_reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """OpenAI's usage object. `num_reasoning_tokens` is None where nobody counts them."""
    details = {"completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens}}
    return {
        **(details if num_reasoning_tokens is not None else {}),
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens or 0},
    }


def num_completion_tokens(outputs: Iterable[RequestOutput]) -> int:
    """Tokens of all sequences."""
    return sum(len(c.token_ids) for output in outputs for c in output.outputs)


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, _LOWEST_LOGPROB) if not math.isnan(logprob) else _LOWEST_LOGPROB


def token_label(token_id: int, entry: Logprob, as_id: bool) -> str:
    """How a token is shown beside its log-probability."""
    return f"token_id:{token_id}" if as_id else entry.decoded_token or ""


def best_of_entry(entry: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` most likely tokens of a position."""
    ranked = [item for item in entry.items() if (item[1].rank or 0) <= count]
    return sorted(ranked, key=lambda item: item[1].rank or 0)


def prompt_logprobs_of(entries: PromptLogprobs | None) -> list[Any] | None:
    """vLLM's `prompt_logprobs`: for each position a map from id to its entry."""
    if entries is None:
        return None
    return [
        entry
        and {
            str(token_id): {
                "logprob": finite(candidate.logprob),
                "rank": candidate.rank,
                "decoded_token": candidate.decoded_token,
            }
            for token_id, candidate in entry.items()
        }
        for entry in entries
    ]
