# SPDX-License-Identifier: Apache-2.0
"""Parsers by their flags' names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vllm.entrypoints.openai.parsers.events import OutputParser
from vllm.entrypoints.openai.parsers.thinking import (
    ThinkParser,
    prompt_closed_thinking,
    prompt_leaves_thinking_open,
)
from vllm.entrypoints.openai.parsers.tools import ForcedToolParser, HermesToolParser
from vllm.tokenizers.tokenizer import Tokenizer

INKLING = "inkling"


@dataclasses.dataclass(frozen=True)
class ParserNeeds:
    """What decides how an answer is read."""

    reasoning_parser: str = ""
    tool_parser: str | None = None
    """None: tool calls are not looked for."""
    forced_tool: str | None = None
    """With `force_tools`: the one function whose arguments the answer is."""
    force_tools: bool = False
    inkling: bool = False
    """The model writes Inkling's markers, whatever is looked for in them."""


def make_parser(
    needs: ParserNeeds,
    prompt: str,
    prompt_token_ids: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
) -> OutputParser | None:
    """The parser of one sequence after a prompt, or None if the answer is plain text."""
    if needs.inkling and tokenizer is not None:
        from vllm.entrypoints.openai.parsers.inkling import InklingParser

        return InklingParser(
            tokenizer,
            prompt_token_ids,
            split_reasoning=needs.reasoning_parser == INKLING,
            split_tools=needs.tool_parser == INKLING,
        )
    tools: OutputParser | None = None
    if needs.force_tools:
        tools = ForcedToolParser(needs.forced_tool)
    elif needs.tool_parser == "hermes":
        tools = HermesToolParser()
    tagged = needs.reasoning_parser in ("qwen3", "deepseek_r1")
    if tagged and not prompt_closed_thinking(prompt):
        opened = prompt_leaves_thinking_open(prompt) or needs.reasoning_parser == "deepseek_r1"
        return ThinkParser(opened, tools)
    return tools
