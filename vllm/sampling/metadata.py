# SPDX-License-Identifier: Apache-2.0
"""Sampling options of a batch as tensors on the device, made anew only when the batch changes."""

from __future__ import annotations

import dataclasses

import torch

from vllm.sampling_params import SamplingParams


@dataclasses.dataclass
class SamplingMetadata:
    """Options of n rows of logits. A tensor is None where no row needs its operation."""

    params: list[SamplingParams]
    all_greedy: bool
    any_random: bool
    greedy: torch.Tensor | None
    """(n,) bool, in a batch of both kinds."""
    temperature: torch.Tensor | None
    """(n, 1); 1 for greedy rows."""
    top_k: torch.Tensor | None
    """(n,) int64; the vocabulary's size for all."""
    top_p: torch.Tensor | None
    """(n,)."""
    min_p: torch.Tensor | None
    """(n, 1)."""
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """Presence, frequency, repetition, each (n, 1)."""
    seeded: list[int]
    """Rows with a seed of their own."""
    biased: list[int]
    """Rows with logit_bias, allowed_token_ids, bad words or min_tokens."""
    max_logprobs: int
    """Most alternatives that a row wants; -1: no row wants log-probabilities."""
    needs_history: bool
    """Whether a row's logits depend on the tokens before."""

    @property
    def is_plain(self) -> bool:
        """Whether the most likely token of the unchanged logits is all that is wanted."""
        return (
            self.all_greedy and self.penalties is None and not self.biased and self.max_logprobs < 0
        )


def make_metadata(
    params: list[SamplingParams], vocab_size: int, device: torch.device
) -> SamplingMetadata:
    """The options of `params` as tensors."""

    def column(values: list[float], neutral: float, shape: tuple[int, ...]) -> torch.Tensor | None:
        if all(v == neutral for v in values):
            return None
        return torch.tensor(values, dtype=torch.float32, device=device).view(shape)

    rows = (-1, 1)
    greedy = [p.greedy for p in params]
    random = [not g for g in greedy]
    top_k = [p.top_k if p.top_k > 0 and not p.greedy else vocab_size for p in params]
    penalised = [
        [p.presence_penalty for p in params],
        [p.frequency_penalty for p in params],
        [p.repetition_penalty for p in params],
    ]
    penalties = None
    if any(any(v != n for v in vs) for vs, n in zip(penalised, (0.0, 0.0, 1.0), strict=True)):
        presence, frequency, repetition = (
            torch.tensor(v, dtype=torch.float32, device=device).view(rows) for v in penalised
        )
        penalties = (presence, frequency, repetition)
    biased = [i for i, p in enumerate(params) if _is_biased(p)]
    return SamplingMetadata(
        params=params,
        all_greedy=not any(random),
        any_random=any(random),
        greedy=torch.tensor(greedy, device=device) if any(greedy) and any(random) else None,
        temperature=column([1.0 if p.greedy else p.temperature for p in params], 1.0, rows),
        top_k=None
        if all(k >= vocab_size for k in top_k)
        else torch.tensor(top_k, device=device).clamp(max=vocab_size),
        top_p=column([1.0 if p.greedy else p.top_p for p in params], 1.0, (-1,)),
        min_p=column([0.0 if p.greedy else p.min_p for p in params], 0.0, rows),
        penalties=penalties,
        seeded=[i for i, p in enumerate(params) if p.seed is not None and not p.greedy],
        biased=biased,
        max_logprobs=max((-1 if p.logprobs is None else p.logprobs for p in params), default=-1),
        needs_history=penalties is not None or any(_has_history(params[i]) for i in biased),
    )


def _is_biased(params: SamplingParams) -> bool:
    return bool(params.logit_bias or params.allowed_token_ids or _has_history(params))


def _has_history(params: SamplingParams) -> bool:
    return bool(params.bad_words_token_ids) or params.min_tokens > 0
