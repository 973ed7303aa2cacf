# SPDX-License-Identifier: Apache-2.0
"""How much is computed in one step, and whose turn it is."""

from __future__ import annotations

import dataclasses

from vllm.config.fields import check_values, option, raise_usage
from vllm.errors import Diagnostic, ExitCode


@dataclasses.dataclass
class SchedulerConfig:
    """Scheduling."""

    max_num_batched_tokens: int | None = option(None, minimum=1)
    """Tokens computed in one step; unset: 8192 on GPUs, 2048 on the CPU."""
    max_num_seqs: int = option(256, minimum=1)
    """Sequences that run at once."""
    policy: str = option("fcfs", choices=("fcfs", "priority"), flag="--scheduling-policy")
    """Who is next: first come first served, or the lowest priority value."""
    enable_chunked_prefill: bool = True
    """Compute long prompts in pieces, between which others decode."""
    long_prefill_token_threshold: int = option(0, minimum=0)
    """Prompt tokens that one request may take of a step; 0: all that are free."""
    async_scheduling: bool | None = None
    """Schedule the next step while the device runs this one; unset: on GPUs."""

    def __post_init__(self) -> None:
        raise_usage(check_values(self))

    def check_lengths(self, max_model_len: int) -> list[Diagnostic]:
        """Without chunked prefill the longest prompt must fit into one step."""
        budget = self.max_num_batched_tokens or 0
        findings = []
        if not self.enable_chunked_prefill and budget < max_model_len:
            findings.append(
                Diagnostic(
                    "batched-tokens",
                    f"a step of {budget:,} tokens cannot hold a prompt of {max_model_len:,}",
                    why="without chunked prefill a prompt is computed in one step",
                    fix=f"--max-num-batched-tokens {max_model_len}, or --enable-chunked-prefill",
                    exit_code=ExitCode.USAGE,
                )
            )
        if budget < self.max_num_seqs:
            findings.append(
                Diagnostic(
                    "batched-tokens",
                    f"a step of {budget:,} tokens cannot advance {self.max_num_seqs:,} sequences",
                    why="each running sequence takes at least one token of a step",
                    fix=f"--max-num-batched-tokens {self.max_num_seqs}, or --max-num-seqs {budget}",
                    exit_code=ExitCode.USAGE,
                )
            )
        return findings
