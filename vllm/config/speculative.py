# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: who drafts, and how far ahead."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.config.fields import check_values, option, raise_usage, wrong_value
from vllm.config.shape import ModelShape
from vllm.errors import Diagnostic


@dataclasses.dataclass
class SpeculativeConfig:
    """Speculative decoding (`--speculative-config` as JSON)."""

    method: str = option("mtp", choices=("mtp",))
    """mtp: the checkpoint's own draft head."""
    num_speculative_tokens: int | None = option(None, minimum=1)
    """Tokens drafted a step; unset: as many as the draft head has depths."""

    def __post_init__(self) -> None:
        raise_usage(check_values(self))

    @classmethod
    def from_json(cls, value: Any) -> SpeculativeConfig:
        """From `--speculative-config`. Raises `UsageError` naming a key that is not known."""
        known = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(value, dict) or not set(value) <= set(known):
            wanted = f"a JSON object with {' and '.join(known)}"
            raise_usage([wrong_value("--speculative-config", value, wanted)])
        return cls(**value)

    def check_model(self, shape: ModelShape, architecture: str) -> list[Diagnostic]:
        """Whether the model has the draft head; fills in the number of tokens."""
        depths = shape.num_mtp_layers
        if depths == 0:
            return [
                Diagnostic(
                    "speculative-method",
                    f"{architecture} has no MTP draft head in this checkpoint",
                    why="config.json names no MTP layers",
                    fix="leave out --speculative-config",
                )
            ]
        if self.num_speculative_tokens is None:
            self.num_speculative_tokens = depths
        if self.num_speculative_tokens <= depths:
            return []
        return [
            Diagnostic(
                "speculative-tokens",
                f"{self.num_speculative_tokens} tokens cannot be drafted ahead",
                why=f"the draft head has {depths} depths, one for each token",
                fix=f'"num_speculative_tokens": {depths}',
            )
        ]
