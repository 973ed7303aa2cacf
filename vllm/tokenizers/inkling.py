# SPDX-License-Identifier: Apache-2.0
"""Inkling's chat format, straight to token ids.

    message = ROLE [author as text] KIND content <|end_message|>

What users write is encoded with the recognition of special tokens off, so that a typed
"<|end_message|>" is text and cannot forge a turn. There is no Jinja template.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from vllm.errors import ConfigError, Diagnostic, RequestError
from vllm.tokenizers.tokenizer import Tokenizer

EFFORTS = {
    "none": 0.0,
    "minimal": 0.1,
    "low": 0.2,
    "medium": 0.7,
    "high": 0.9,
    "xhigh": 0.99,
    "max": 0.99,
}
DEFAULT_EFFORT = 0.9
_ROLES = {
    "system": "message_system",
    "developer": "message_system",
    "user": "message_user",
    "assistant": "message_model",
    "tool": "message_tool",
    "function": "message_tool",
}
MARKERS = (
    "message_user", "message_model", "message_system", "message_tool", "content_text",
    "content_model_end_sampling", "content_thinking", "end_message", "content_tool_error",
    "content_xml", "content_invoke_tool_json", "content_invoke_tool_text",
)  # fmt: skip
_ALIASES = {"content_xml": "unused_200024"}  # as some checkpoints spell it


def _spellings(name: str) -> list[str]:
    return [f"<|{spelling}|>" for spelling in (name, _ALIASES.get(name)) if spelling]


def _id_of(tokenizer: Tokenizer, name: str) -> int | None:
    for token in _spellings(name):
        token_id = tokenizer.backend.token_to_id(token)
        if token_id is not None:
            return token_id
    return None


def markers_absent_from(tokens: Container[str]) -> list[str]:
    """Markers that are in no spelling among a tokenizer's tokens."""
    return [name for name in MARKERS if not any(t in tokens for t in _spellings(name))]


def missing_markers(tokenizer: Tokenizer) -> list[str]:
    """Markers that the tokenizer has no token for."""
    return [name for name in MARKERS if _id_of(tokenizer, name) is None]


def marker_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Marker to id, looked up by name. Raises `ConfigError` naming those that are missing."""
    missing = missing_markers(tokenizer)
    if missing:
        raise ConfigError(markers_problem(missing))
    found = {name: _id_of(tokenizer, name) for name in MARKERS}
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def markers_problem(missing: list[str]) -> Diagnostic:
    """The finding for markers that are missing."""
    return Diagnostic(
        "inkling-tokens",
        "the tokenizer lacks tokens of Inkling's chat format",
        why=f"missing: {', '.join(f'<|{name}|>' for name in missing)}",
        fix="use the checkpoint's own tokenizer.json, or --tokenizer-mode hf",
    )


def effort_text(effort: Any) -> str:
    """The number in the effort message: at most two decimals. Raises `RequestError`."""
    if isinstance(effort, str):
        if effort not in EFFORTS:
            raise RequestError(
                f"reasoning_effort {effort[:40]!r} is not known: {', '.join(EFFORTS)}, "
                "or a number from 0 to 1",
                "reasoning_effort",
            )
        effort = EFFORTS[effort]
    if isinstance(effort, bool) or not isinstance(effort, (int, float)) or not 0 <= effort <= 1:
        raise RequestError("reasoning_effort must be a name or from 0 to 1", "reasoning_effort")
    # The reference rounds the hundredths, half to even: 0.005 is 0, where %.2f gives 0.01.
    return f"{round(effort * 100) / 100:.2f}".rstrip("0").rstrip(".")


class InklingRenderer:
    """Renders conversations for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers import Tokenizer as Backend

        self.ids = marker_ids(tokenizer)
        # A copy: the switch belongs to the tokenizer, and /v1/completions wants the other way.
        self._backend = Backend.from_str(tokenizer.backend.to_str())
        self._backend.encode_special_tokens = True

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        reasoning_effort: Any = None,
    ) -> list[int]:
        """Token ids of a conversation (checked messages). Raises `RequestError`."""
        out: list[int] = []
        declared = [*(tools or [])]
        for message in messages:
            if message["role"] == "developer":
                declared += message.get("tools") or []
        if declared:
            self._message(out, "system", "content_xml", _declaration(declared), "tool_declare")
        effort = effort_text(DEFAULT_EFFORT if reasoning_effort is None else reasoning_effort)
        effort_due = True
        names = _names_of_calls(messages)
        for message in messages:
            if effort_due and message["role"] not in ("system", "developer"):
                self._effort(out, effort)
                effort_due = False
            self._turn(out, message, names)
        if effort_due:
            self._effort(out, effort)
        if add_generation_prompt:
            out.append(self.ids["message_model"])
        return out

    def _effort(self, out: list[int], effort: str) -> None:
        self._message(out, "system", "content_text", f"Thinking effort level: {effort}")

    def _turn(self, out: list[int], message: Mapping[str, Any], names: dict[str, str]) -> None:
        role = message["role"]
        author = ""
        if role in ("tool", "function"):
            author = message.get("name") or names.get(str(message.get("tool_call_id")), "")
        if role == "assistant":
            thinking = message.get("reasoning") or message.get("reasoning_content")
            if isinstance(thinking, str) and thinking:
                self._message(out, role, "content_thinking", thinking)
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            if part is not None:
                self._message(out, role, "content_text", part, author)
        if role == "assistant":
            for call in message.get("tool_calls") or []:
                self._call(out, call["function"])
            out.append(self.ids["content_model_end_sampling"])

    def _call(self, out: list[int], function: Mapping[str, Any]) -> None:
        name, arguments = function["name"], function.get("arguments") or {}
        if not isinstance(arguments, dict):
            raise RequestError(f"arguments of the tool call {name!r} are no object", "messages")
        # The outer keys are sorted, inner ones keep their order, as in the reference.
        ordered = json.dumps(
            {key: arguments[key] for key in sorted(arguments)},
            ensure_ascii=False,
            separators=(",", ":"),
        )
        text = f'{{"name":{_compact(name)},"args":{ordered}}}'
        self._message(out, "assistant", "content_invoke_tool_json", text, name)

    def _message(self, out: list[int], role: str, kind: str, text: str, author: str = "") -> None:
        out.append(self.ids[_ROLES[role]])
        if author:
            out += self._encode(author)
        out.append(self.ids[kind])
        out += self._encode(text)
        out.append(self.ids["end_message"])

    def _encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids


def _declaration(tools: Sequence[Mapping[str, Any]]) -> str:
    entries = []
    for tool in tools:
        function = tool.get("function", tool)
        entries.append(
            {
                "description": function.get("description") or "",
                "name": function.get("name", ""),
                "parameters": function.get("parameters") or {},
                "type": "function",
            }
        )
    return _compact(entries)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _names_of_calls(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Id of a past tool call to its function's name."""
    return {
        str(call.get("id")): call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls") or []
    }
