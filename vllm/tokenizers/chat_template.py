# SPDX-License-Identifier: Apache-2.0
"""Chat templates: Jinja in a sandbox, with the names that model authors rely on."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

from vllm.errors import ConfigError, Diagnostic, RequestError

_LOOP_OVER_CONTENT = re.compile(
    r"""for\s+\w+\s+in\s+[\w.\[\]'"]*(\.content|\[['"]content['"]\]|\bcontent)\b"""
)


class ChatTemplate:
    """A compiled template. The constructor raises `ConfigError` for one that does not parse."""

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        from jinja2 import TemplateSyntaxError

        self.source = source
        self._special_tokens = special_tokens or {}
        self.takes_parts = bool(_LOOP_OVER_CONTENT.search(source))
        """Whether message contents go in as lists of parts rather than strings."""
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                Diagnostic(
                    "chat-template",
                    "the chat template does not parse",
                    why=f"{error.message} in line {error.lineno}",
                    fix="correct it, or give another with --chat-template",
                )
            ) from None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation. Raises `RequestError` with the template's own words."""
        from jinja2 import TemplateError

        try:
            text = self._template.render(
                **{
                    **self._special_tokens,
                    **variables,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateError as error:
            raise RequestError(f"the chat template refuses: {error}", "messages") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            reason = f"the chat template cannot take this: {type(error).__name__}: {error}"
            raise RequestError(reason, "messages") from None
        return _cut_after_last(text, messages) if continue_final_message else text


def _cut_after_last(text: str, messages: list[dict[str, Any]]) -> str:
    """Drop what the template writes after the last message, so that the model goes on in it."""
    content = messages[-1].get("content")
    if isinstance(content, list):
        content = content[-1].get("text") if content else None
    if not isinstance(content, str) or not content.strip():
        raise RequestError("continue_final_message needs text in the last message", "messages")
    at = text.rfind(content.strip())
    if at < 0:
        raise RequestError("the chat template does not show the last message as it is", "messages")
    tail = content.lstrip()  # its trailing space stays if the template kept it
    end = at + len(tail if text.startswith(tail, at) else content.strip())
    return text[:end]


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the model's words for training; here it changes nothing."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
