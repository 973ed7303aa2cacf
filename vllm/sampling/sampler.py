# SPDX-License-Identifier: Apache-2.0
"""Logits to tokens, in vLLM's order of operations.

mask of the grammar, allowed ids, bad words, min_tokens, bias, penalties; then either the
most likely token, or temperature, min_p, top_k, top_p and a draw. Log-probabilities are those
of the raw logits. Everything stays on the device.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from vllm.layers.ops import cpu
from vllm.sampling.metadata import SamplingMetadata
from vllm.sampling_params import SamplingParams

_MASKED = float("-inf")


@dataclasses.dataclass
class History:
    """Tokens before the ones that are sampled; on the host, read only where a row needs them."""

    token_ids: np.ndarray
    """(rows, length) of the persistent batch."""
    rows: np.ndarray
    """(n,) row of each logits row."""
    num_tokens: np.ndarray
    """(n,) tokens known to each."""
    num_prompt_tokens: list[int]

    def tokens(self, index: int) -> np.ndarray:
        """Prompt and output of one logits row."""
        return self.token_ids[self.rows[index], : self.num_tokens[index]]

    def output(self, index: int) -> np.ndarray:
        """Output of one logits row."""
        return self.tokens(index)[self.num_prompt_tokens[index] :]


@dataclasses.dataclass
class SamplerOutput:
    """n sampled tokens, on the device."""

    token_ids: torch.Tensor
    """(n,) int64; -1 where the logits were not numbers."""
    logprob_ids: torch.Tensor | None = None
    """(n, 1 + k): the sampled token, then the most likely ones."""
    logprobs: torch.Tensor | None = None
    """(n, 1 + k) natural logarithms."""
    ranks: torch.Tensor | None = None
    """(n,) rank of the sampled token, from 1."""


def sample(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    history: History,
    bitmask: torch.Tensor | None = None,
    masked_rows: torch.Tensor | None = None,
) -> SamplerOutput:
    """One token a row of (n, vocabulary) logits, which may be overwritten.

    bitmask: (m, ceil(vocabulary / 32)) int32, 1 = allowed, for the rows in `masked_rows`.
    """
    if metadata.is_plain and bitmask is None:
        return SamplerOutput(_argmax(logits))
    logits = logits.float()
    raw = logits.clone() if metadata.max_logprobs >= 0 else logits
    if bitmask is not None and masked_rows is not None:
        logits[masked_rows] = apply_bitmask(logits[masked_rows], bitmask)
    for index in metadata.biased:
        apply_bias(logits[index], metadata.params[index], history, index)
    if metadata.penalties is not None:
        apply_penalties(logits, metadata, history)
    tokens = _choose(logits, metadata, history)
    if metadata.max_logprobs < 0:
        return SamplerOutput(tokens)
    return SamplerOutput(tokens, *gather_logprobs(raw, tokens, metadata.max_logprobs))


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token; -1 for rows with NaN, whose maximum is NaN, and for -inf alone."""
    if logits.device.type == "cpu" and cpu.has_kernels(logits.dtype):
        return cpu.argmax(logits)
    values, tokens = logits.max(-1)
    return torch.where(values.isnan() | values.isinf(), -1, tokens)


def _choose(logits: torch.Tensor, metadata: SamplingMetadata, history: History) -> torch.Tensor:
    if metadata.all_greedy:
        return _argmax(logits)
    broken = _argmax(logits) < 0
    scaled = logits if metadata.temperature is None else logits / metadata.temperature
    probs = truncated_probs(scaled, metadata)
    drawn = draw(probs, metadata, history)
    if metadata.greedy is not None:
        drawn = torch.where(metadata.greedy, logits.argmax(-1), drawn)
    return torch.where(broken, -1, drawn)


def truncated_probs(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """(n, vocabulary) probabilities after min_p, top_k and top_p."""
    if metadata.min_p is not None:
        probs = logits.softmax(-1)
        limit = probs.amax(-1, keepdim=True) * metadata.min_p
        logits = logits.masked_fill(probs < limit, _MASKED)
    if metadata.top_k is None and metadata.top_p is None:
        return logits.softmax(-1)
    ordered, indices = logits.sort(-1, descending=True)
    if metadata.top_k is not None:
        ranks = torch.arange(logits.shape[-1], device=logits.device)
        ordered = ordered.masked_fill(ranks >= metadata.top_k[:, None], _MASKED)
    probs = ordered.softmax(-1)
    if metadata.top_p is not None:
        before = probs.cumsum(-1) - probs
        # The most likely token always stays.
        probs = probs.masked_fill(before >= metadata.top_p[:, None], 0.0)
    return torch.zeros_like(probs).scatter_(-1, indices, probs)


def draw(probs: torch.Tensor, metadata: SamplingMetadata, history: History) -> torch.Tensor:
    """A token a row with these weights: the largest of weight / exponential noise.

    A seeded row's noise depends on its seed and its position alone.
    """
    noise = torch.empty_like(probs)
    if len(metadata.seeded) < len(noise):
        noise.exponential_()
    for index in metadata.seeded:
        seed = metadata.params[index].seed
        assert seed is not None
        generator = torch.Generator(probs.device)
        generator.manual_seed(position_seed(seed, int(history.num_tokens[index])))
        noise[index].exponential_(generator=generator)
    return (probs / noise.clamp_(min=torch.finfo(noise.dtype).tiny)).argmax(-1)


def position_seed(seed: int, position: int) -> int:
    """A generator's seed for one position (splitmix64's mixing)."""
    mixed = (seed + position * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Logits with -inf where the grammar allows no token."""
    bits = torch.arange(32, device=logits.device, dtype=torch.int32)
    allowed = ((bitmask[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[-1]]
    return logits.masked_fill(~allowed, _MASKED)


def apply_bias(logits: torch.Tensor, params: SamplingParams, history: History, index: int) -> None:
    """allowed_token_ids, bad words, min_tokens and logit_bias of one row, in place."""
    if params.allowed_token_ids:
        allowed = torch.tensor(params.allowed_token_ids, device=logits.device)
        kept = logits[allowed]
        logits.fill_(_MASKED)
        logits[allowed] = kept
    if params.bad_words_token_ids:
        banned = _completed_words(params.bad_words_token_ids, history.output(index))
        logits[banned] = _MASKED
    if params.min_tokens > len(history.output(index)):
        stops = list(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops += params.eos_token_ids or []
        logits[stops] = _MASKED
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)


def _completed_words(words: list[list[int]], output: np.ndarray) -> list[int]:
    """Last tokens of the words whose beginnings the output ends with."""
    banned = []
    for word in words:
        beginning = word[:-1]
        if not beginning or output[-len(beginning) :].tolist() == beginning:
            banned.append(word[-1])
    return banned


def apply_penalties(logits: torch.Tensor, metadata: SamplingMetadata, history: History) -> None:
    """Presence and frequency over the output, repetition over prompt and output, in place."""
    assert metadata.penalties is not None
    presence, frequency, repetition = metadata.penalties
    counts = torch.zeros_like(logits)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for index, params in enumerate(metadata.params):
        if (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (
            0.0,
            0.0,
            1.0,
        ):
            continue
        output = torch.from_numpy(history.output(index).astype(np.int64)).to(logits.device)
        tokens = torch.from_numpy(history.tokens(index).astype(np.int64)).to(logits.device)
        counts[index].index_add_(0, output, torch.ones_like(output, dtype=logits.dtype))
        seen[index, tokens] = True
    factor = torch.where(seen, repetition, 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits -= frequency * counts + presence * (counts > 0)


def gather_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids (n, 1 + k), log-probabilities (n, 1 + k) and the rank (n,) of `tokens` (n,)."""
    logprobs = logits.float().log_softmax(-1)
    chosen = tokens.clamp(min=0)[:, None]
    value = logprobs.gather(-1, chosen)
    ranks = (logprobs > value).sum(-1) + 1
    top = logprobs.topk(min(num_top, logits.shape[-1]), -1)
    return torch.cat([chosen, top.indices], 1), torch.cat([value, top.values], 1), ranks
