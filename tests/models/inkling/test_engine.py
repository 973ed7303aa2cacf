# SPDX-License-Identifier: Apache-2.0
"""Inkling in the engine against transformers: whatever the scheduling, the same tokens."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures.tiny_models import tiny_checkpoint, tiny_reference
from tests.models.inkling.checkpoints import (
    nvfp4_checkpoints,
    original_checkpoint,
    original_config,
)
from tests.models.inkling.oracle import drafts as oracle_drafts
from vllm import LLM, SamplingParams
from vllm.engine.messages import EngineCoreRequest

MTP = {"method": "mtp", "num_speculative_tokens": 3}


def random_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 500, (length,), generator=generator).tolist()


PROMPTS = [random_ids(n, n) for n in (90, 1, 30, 57)]


def make(path: Path, **settings: Any) -> LLM:
    settings.setdefault("max_num_seqs", 8)
    settings.setdefault("num_gpu_blocks_override", 128)
    return LLM(str(path), skip_tokenizer_init=True, dtype="float32", **settings)


def generate(llm: LLM, prompts: list[list[int]], count: int = 30) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    results = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(r.outputs[0].token_ids) for r in results]


def run(path: Path, prompts: list[list[int]], count: int = 30, **settings: Any) -> list[list[int]]:
    llm = make(path, **settings)
    tokens = generate(llm, prompts, count)
    llm.shutdown()
    return tokens


@functools.cache
def reference(count: int = 30) -> list[list[int]]:
    """transformers' greedy tokens after each prompt."""
    model = tiny_reference("inkling-text")
    model.generation_config.eos_token_id = None  # the engine is told to ignore it
    found = []
    for ids in PROMPTS:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids]),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        found.append(out[0, len(ids) :].tolist())
    return found


@pytest.mark.parametrize("spelling", ["transformers", "original"])
def test_both_spellings_give_transformers_tokens(spelling: str) -> None:
    path = original_checkpoint() if spelling == "original" else tiny_checkpoint("inkling-text")
    assert run(path, PROMPTS) == reference()


@pytest.mark.slow
def test_three_hundred_tokens() -> None:
    assert run(tiny_checkpoint("inkling-text"), PROMPTS, 300) == reference(300)


@pytest.mark.parametrize("drafts", [None, MTP], ids=["plain", "mtp"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 17])
def test_chunks_do_not_change_tokens(chunk: int, drafts: Any) -> None:
    """Chunks shorter than a convolution, and ends in the middle of every window."""
    settings = {"long_prefill_token_threshold": chunk, "speculative_config": drafts}
    assert run(original_checkpoint(), PROMPTS, 12, **settings) == [r[:12] for r in reference()]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(1, 18))
def test_every_chunk_size(chunk: int) -> None:
    settings = {"long_prefill_token_threshold": chunk}
    assert run(original_checkpoint(), PROMPTS, **settings) == reference()


@pytest.mark.parametrize("drafts", [None, MTP], ids=["plain", "mtp"])
def test_prefix_hits_carry_windows_and_convolutions(drafts: Any) -> None:
    """The shared part ends behind a block: within the window of 24 and of the convolutions."""
    shared = random_ids(64, 9)
    pair = [shared + random_ids(n, 100 + n) for n in (7, 30)]
    cold = run(original_checkpoint(), pair, enable_prefix_caching=False)
    llm = make(original_checkpoint(), speculative_config=drafts)
    warm = [generate(llm, [p])[0] for p in pair]
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    (again,) = llm.generate([{"prompt_token_ids": pair[1]}], params, use_tqdm=False)
    llm.shutdown()
    assert warm == cold
    assert again.num_cached_tokens == 80


@pytest.mark.parametrize("drafts", [None, MTP], ids=["plain", "mtp"])
def test_preemption_does_not_change_tokens(drafts: Any) -> None:
    llm = make(original_checkpoint(), num_gpu_blocks_override=14, speculative_config=drafts)
    tokens = generate(llm, PROMPTS)
    llm.shutdown()
    assert tokens == reference()


def test_a_short_prompt_after_a_long_one_is_what_it_was_before() -> None:
    llm = make(tiny_checkpoint("inkling-text"))
    before = generate(llm, [PROMPTS[2]])
    generate(llm, [random_ids(450, 77)])
    assert generate(llm, [PROMPTS[2]]) == before == [reference()[2]]
    llm.shutdown()


def test_packed_experts_are_their_values() -> None:
    packed, unpacked = nvfp4_checkpoints()
    assert run(packed, PROMPTS) == run(unpacked, PROMPTS)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_drafts_do_not_change_greedy_tokens(count: int) -> None:
    speculative = {"method": "mtp", "num_speculative_tokens": count}
    assert run(original_checkpoint(), PROMPTS, speculative_config=speculative) == reference()


def test_the_first_drafts_are_the_oracles() -> None:
    """Every depth over a whole prompt, in one piece and in chunks."""
    weights = load_file(original_checkpoint() / "model.safetensors")
    model = tiny_reference("inkling-text")
    ids = PROMPTS[0]
    with torch.inference_mode():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
    first = reference()[0][0]
    want = oracle_drafts(weights, original_config(), hidden, [*ids, first], 3)
    for settings in ({}, {"long_prefill_token_threshold": 7}):
        llm = make(original_checkpoint(), speculative_config=MTP, **settings)
        core = llm._engine._core
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        core.add_request(EngineCoreRequest("a", ids, params, 0.0))
        while not core.step().outputs:
            pass
        (running,) = core.scheduler.requests.values()
        assert running.draft_token_ids == want
        llm.shutdown()


def test_accepted_and_rejected_drafts_are_counted() -> None:
    llm = make(original_checkpoint(), speculative_config=MTP)
    core, totals = llm._engine._core, [0, 0, 0]
    step = core.step

    def counted() -> Any:
        outputs = step()
        if outputs.stats is not None:
            stats = outputs.stats
            for i, n in enumerate(
                (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens)
            ):
                totals[i] += n
        return outputs

    core.step = counted
    tokens = generate(llm, [PROMPTS[0]])
    llm.shutdown()
    rounds, drafted, accepted = totals
    assert tokens == [reference()[0]]
    # A round yields one token and the drafts that it accepted; for the last token of all
    # there may be no room to draft.
    assert rounds + accepted in (28, 29)
    assert rounds <= drafted <= 3 * rounds
