# SPDX-License-Identifier: Apache-2.0
"""Every family's logits against transformers', over the ways a prompt can reach the cache."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.fixtures.forward import PagedModel, load_tiny
from tests.fixtures.tiny_models import FAMILIES, VOCAB_SIZE, tiny_checkpoint, tiny_reference

PROMPT_LEN = 200
TOLERANCE = 1e-4
"""Largest difference of float32 logits that reordered sums may make."""


@functools.cache
def reference_logits(family: str, seed: int, length: int = PROMPT_LEN) -> torch.Tensor:
    """(length, vocabulary) logits of transformers for a random prompt."""
    model = tiny_reference(family)
    with torch.inference_mode():
        return model(torch.tensor([prompt(seed, length)])).logits[0]


def prompt(seed: int, length: int = PROMPT_LEN) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def paged(family: str) -> PagedModel:
    return load_tiny(tiny_checkpoint(family))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual - expected).abs()
    worst = int(error.max(-1).values.argmax())
    assert error.max() <= TOLERANCE, f"row {worst} differs by {error.max():.2e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_prompt_gives_the_logits_of_transformers(family: str) -> None:
    assert_close(paged(family).step({"a": prompt(1)})["a"], reference_logits(family, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_token_by_token_gives_the_same_logits(family: str) -> None:
    model = paged(family)
    rows = [model.step({"a": [token]})["a"] for token in prompt(1)]
    assert_close(torch.cat(rows), reference_logits(family, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_any_length_give_the_same_logits(family: str) -> None:
    model, tokens, rows = paged(family), prompt(1), []
    for length in (1, 3, 16, 17, 64, 99):
        rows.append(model.step({"a": tokens[:length]})["a"])
        tokens = tokens[length:]
    assert not tokens
    assert_close(torch.cat(rows), reference_logits(family, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_of_prompts_and_decodes_gives_each_its_own_logits(family: str) -> None:
    model = paged(family)
    prompts = {"a": prompt(1), "b": prompt(2, 37), "c": prompt(3, 5)}
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    done = dict.fromkeys(prompts, 0)
    # "b" and "c" decode while chunks of "a" still come in; "c" joins late.
    schedule = [{"a": 7, "b": 30}, {"a": 50, "b": 1}, {"a": 1, "b": 1, "c": 4}, {"c": 1}]
    schedule += [{"a": 142, "b": 5}]
    for step in schedule:
        chunk = {n: prompts[n][done[n] : done[n] + count] for n, count in step.items()}
        for name, logits in model.step(chunk).items():
            rows[name].append(logits)
            done[name] += step[name]
    assert done == {"a": 200, "b": 37, "c": 5}
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        expected = reference_logits(family, seed, len(prompts[name]))
        assert_close(torch.cat(rows[name]), expected)
