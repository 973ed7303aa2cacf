# SPDX-License-Identifier: Apache-2.0
"""Bodies of the HTTP API: OpenAI's fields and vLLM's extra ones. Unknown fields are ignored."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm.errors import RequestError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams


class StreamOptions(msgspec.Struct):
    """Options of a streamed answer."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JsonSchemaFormat(msgspec.Struct):
    """The schema in `response_format`."""

    name: str = ""
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format`: text, json_object, json_schema, structural forms are not taken."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class SamplingRequest(msgspec.Struct, kw_only=True):
    """Fields that both generating endpoints share; None means the default."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    echo: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None

    def sampling_params(
        self, defaults: dict[str, Any], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """The parameters for the engine. Raises `RequestError`."""
        names = (
            "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
            "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids",
            "include_stop_str_in_output", "ignore_eos", "min_tokens", "allowed_token_ids",
            "bad_words", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names}
        values = {**defaults, **{k: v for k, v in given.items() if v is not None}}
        values["max_tokens"] = max_tokens
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(
            **values,
            logprobs=logprobs,
            logit_bias=_bias(self.logit_bias),
            structured_outputs=self.constraint(),
            output_kind=kind,
        )

    def constraint(self) -> StructuredOutputsParams | None:
        """What the answer must look like, from whichever field says so."""
        found = {
            kind: getattr(self, f"guided_{kind}")
            for kind in ("json", "regex", "choice", "grammar")
            if getattr(self, f"guided_{kind}") is not None
        }
        given = StructuredOutputsParams(**found) if found else None
        from_format = _of_format(self.response_format)
        all_given = [c for c in (self.structured_outputs, given, from_format) if c is not None]
        if len(all_given) > 1 or len(found) > 1:
            raise RequestError(
                "give one of structured_outputs, guided_* and response_format",
                "structured_outputs",
            )
        return all_given[0] if all_given else None


class CompletionRequest(SamplingRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool = True


class ChatCompletionRequest(SamplingRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Any]
    logprobs: bool | None = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def _bias(entries: dict[str, float] | None) -> dict[int, float] | None:
    if entries is None:
        return None
    try:
        return {int(token): max(-100.0, min(100.0, bias)) for token, bias in entries.items()}
    except ValueError:
        raise RequestError("logit_bias must map token ids to numbers", "logit_bias") from None


def _of_format(form: ResponseFormat | None) -> StructuredOutputsParams | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if form.type == "json_schema":
        schema = form.json_schema.schema if form.json_schema else None
        if schema is None:
            raise RequestError("response_format has no json_schema.schema", "response_format")
        return StructuredOutputsParams(json=schema)
    raise RequestError(
        f"response_format.type {form.type[:40]!r} is not known: text, json_object, json_schema",
        "response_format",
    )
