# SPDX-License-Identifier: Apache-2.0
"""A conversation to a prompt: messages checked and brought into the template's form."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.errors import ConfigError, RequestError
from vllm.tokenizers.chat_template import ChatTemplate

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.input_processor import Prompt
    from vllm.tokenizers import Tokenizer
    from vllm.tokenizers.inkling import InklingRenderer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_MEDIA_PARTS = ("image", "audio", "video", "file")


@dataclasses.dataclass
class RenderedChat:
    """A conversation as the model reads it: text to tokenize, or token ids."""

    text: str | None
    token_ids: list[int] | None = None

    def as_prompt(self) -> Prompt:
        """For the input processor; special tokens are in the text already."""
        if self.token_ids is not None:
            return self.token_ids
        assert self.text is not None
        return self.text


def render_chat(
    tokenizer: Tokenizer | None,
    model_config: ModelConfig,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: Any,
) -> RenderedChat:
    """The prompt of a conversation. Raises `RequestError` naming what is wrong with it."""
    if tokenizer is None:
        raise RequestError("no tokenizer was loaded: a conversation cannot be rendered", "messages")
    checked = check_messages(messages)
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other",
            "continue_final_message",
        )
    if uses_inkling(tokenizer, model_config):
        if continue_final_message:
            raise RequestError("Inkling cannot continue a message", "continue_final_message")
        return RenderedChat(
            None,
            inkling_renderer(tokenizer).render(
                checked,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                reasoning_effort=variables.get("reasoning_effort"),
            ),
        )
    chosen = compiled_template(template, tokenizer) if template else tokenizer.chat_template
    if chosen is None:
        raise RequestError(
            "this model has no chat template; start the server with --chat-template, "
            "or use /v1/completions",
            "messages",
        )
    shaped = [_shape(message, chosen.takes_parts) for message in checked]
    text = chosen.render(
        shaped,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **variables,
    )
    return RenderedChat(text)


def uses_inkling(tokenizer: Tokenizer | None, model_config: ModelConfig) -> bool:
    """Whether prompts and answers have Inkling's format: asked for, or the model's own.

    A checkpoint of that architecture with another tokenizer has a template of its own.
    """
    if tokenizer is None or not model_config.uses_inkling_renderer:
        return False
    from vllm.tokenizers.inkling import missing_markers

    return model_config.tokenizer_mode == "inkling" or not missing_markers(tokenizer)


@functools.lru_cache(maxsize=4)
def inkling_renderer(tokenizer: Tokenizer) -> InklingRenderer:
    """The renderer of a tokenizer; made once."""
    from vllm.tokenizers.inkling import InklingRenderer

    return InklingRenderer(tokenizer)


def compiled_template(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    """A template given instead of the model's; compiled once."""
    return _compile(source, tuple(sorted(tokenizer.special_tokens.items())))


@functools.lru_cache(maxsize=8)
def _compile(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    try:
        return ChatTemplate(source, dict(special_tokens))
    except ConfigError as error:
        raise RequestError(error.findings[0].why, "chat_template") from None


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages whose shape is right. Raises `RequestError` naming the first that is not."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError("messages must be a list", "messages")
    if not messages:
        raise RequestError("messages must not be empty", "messages")
    return [_check_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object", "messages")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{where} has the role {str(role)[:40]!r}; known: {', '.join(ROLES)}", "messages"
        )
    content = message.get("content")
    checked = dict(message)
    if isinstance(content, list):
        checked["content"] = [_text_of(part, where) for part in content]
    elif content is not None and not isinstance(content, str):
        raise RequestError(f"{where}.content must be a string or a list of parts", "messages")
    elif content is None and role in ("user", "system", "developer", "tool"):
        raise RequestError(f"{where} has no content", "messages")
    calls = message.get("tool_calls")
    if calls is not None:
        checked["tool_calls"] = [_check_call(call, where) for call in _as_list(calls, where)]
        if not calls:
            del checked["tool_calls"]
    return checked


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXT_PARTS:
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
        raise RequestError(f"{where} has a part without text", "messages")
    if isinstance(kind, str) and any(media in kind for media in _MEDIA_PARTS):
        raise RequestError(
            f"{where} has a part of type {kind[:40]!r}: this server takes text only", "messages"
        )
    raise RequestError(f"{where} has a part of unknown type {str(kind)[:40]!r}", "messages")


def _as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{where}.tool_calls must be a list", "messages")
    return value


def _check_call(call: Any, where: str) -> dict[str, Any]:
    """A past tool call with its arguments as an object, as templates want them."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} has a tool call without a function's name", "messages")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise RequestError(
                f"{where} has a tool call whose arguments are no JSON", "messages"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def _shape(message: dict[str, Any], takes_parts: bool) -> dict[str, Any]:
    """Contents as strings, or as parts where the template loops over them."""
    content = message.get("content")
    if isinstance(content, list):
        if takes_parts:
            parts = [{"type": "text", "text": text} for text in content]
            return {**message, "content": parts}
        return {**message, "content": "\n".join(content)}
    if content is None and "tool_calls" not in message:
        return {**message, "content": ""}
    if takes_parts and isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    return message
