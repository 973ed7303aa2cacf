# SPDX-License-Identifier: Apache-2.0
"""Constrained output and the parsing of thinking."""

from __future__ import annotations

import dataclasses

from vllm.config.fields import check_values, option, raise_usage

REASONING_PARSERS = ("deepseek_r1", "inkling", "qwen3")


@dataclasses.dataclass
class StructuredOutputsConfig:
    """Structured output."""

    backend: str = option("auto", choices=("auto", "guidance"), flag="--structured-outputs-backend")
    """Library that turns a schema into token masks; auto and guidance are llguidance."""
    reasoning_parser: str = option("", choices=("", *REASONING_PARSERS))
    """Splits thinking from the answer: inkling, qwen3, deepseek_r1; empty: nothing is split."""

    def __post_init__(self) -> None:
        raise_usage(check_values(self))
