# SPDX-License-Identifier: Apache-2.0
"""Parsers by their flags' names."""

from __future__ import annotations

import dataclasses

from vllm.entrypoints.openai.parsers.events import OutputParser
from vllm.entrypoints.openai.parsers.thinking import (
    ThinkParser,
    prompt_closed_thinking,
    prompt_leaves_thinking_open,
)
from vllm.entrypoints.openai.parsers.tools import ForcedToolParser, HermesToolParser

REASONING_PARSERS = ("qwen3", "deepseek_r1")
TOOL_PARSERS = ("hermes",)


@dataclasses.dataclass(frozen=True)
class ParserNeeds:
    """What decides how an answer is read."""

    reasoning_parser: str = ""
    tool_parser: str | None = None
    """None: tool calls are not looked for."""
    forced_tool: str | None = None
    """With `force_tools`: the one function whose arguments the answer is."""
    force_tools: bool = False


def make_parser(needs: ParserNeeds, prompt: str) -> OutputParser | None:
    """The parser of one sequence after `prompt`, or None if the answer is plain text."""
    tools: OutputParser | None = None
    if needs.force_tools:
        tools = ForcedToolParser(needs.forced_tool)
    elif needs.tool_parser == "hermes":
        tools = HermesToolParser()
    if needs.reasoning_parser in REASONING_PARSERS and not prompt_closed_thinking(prompt):
        opened = prompt_leaves_thinking_open(prompt) or needs.reasoning_parser == "deepseek_r1"
        return ThinkParser(opened, tools)
    return tools
