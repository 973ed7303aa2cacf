# SPDX-License-Identifier: Apache-2.0
"""Speculation does not change what is drawn: the same distribution with drafts and without."""

from __future__ import annotations

from collections import Counter
from typing import Any

from scipy.stats import chi2_contingency

from tests.models.inkling.checkpoints import original_checkpoint
from vllm import LLM, SamplingParams

PROMPT = [5, 9, 200, 31]
SAMPLES = 1500


def drawn(speculative: Any, seed: int) -> Counter[tuple[int, ...]]:
    llm = LLM(
        str(original_checkpoint()),
        skip_tokenizer_init=True,
        dtype="float32",
        seed=seed,
        max_num_seqs=64,
        num_gpu_blocks_override=256,
        speculative_config=speculative,
    )
    params = SamplingParams(
        temperature=1.0, top_k=3, max_tokens=3, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": PROMPT}] * SAMPLES
    results = llm.generate(prompts, params, use_tqdm=False)
    llm.shutdown()
    return Counter(tuple(r.outputs[0].token_ids[1:]) for r in results)


def test_tokens_after_drafts_are_distributed_as_without() -> None:
    """Second and third token, the first that drafts can be accepted for: chi-square of both."""
    with_drafts = drawn({"method": "mtp", "num_speculative_tokens": 2}, 1)
    without = drawn(None, 2)
    common = [t for t, n in (with_drafts + without).items() if n >= 20]
    assert len(common) >= 9
    table = [[counts[t] for t in common] for counts in (with_drafts, without)]
    for row, counts in zip(table, (with_drafts, without), strict=True):
        row.append(max(1, SAMPLES - sum(row)))
        assert sum(counts.values()) == SAMPLES
    assert chi2_contingency(table).pvalue > 1e-3
