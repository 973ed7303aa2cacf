# SPDX-License-Identifier: Apache-2.0
"""The engine on a GPU against transformers: logits, greedy tokens, and what may not change them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.fixtures.tiny_models import FAMILIES, tiny_checkpoint, tiny_reference
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu

LENGTHS = (200, 1, 17, 64, 130)
# Heads of 64 and 128 values, as the kernels' vendor paths want them.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 64,
    "swa_head_dim": 64,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def prompts(count: int = len(LENGTHS)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(count)]
    return [torch.randint(3, 500, (n,), generator=generator).tolist() for n in lengths]


def make(path: str, **settings: Any) -> LLM:
    settings.setdefault("dtype", "float32")
    settings.setdefault("kv_cache_memory_bytes", 1 << 30)  # tests run beside each other
    settings.setdefault("max_num_seqs", 64)
    return LLM(path, skip_tokenizer_init=True, **settings)


def generate(llm: LLM, ids: list[list[int]], count: int = 40, **options: Any) -> list[list[int]]:
    params = SamplingParams(
        temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, **options
    )
    results = llm.generate([{"prompt_token_ids": p} for p in ids], params, use_tqdm=False)
    return [list(r.outputs[0].token_ids) for r in results]


def run(path: str, ids: list[list[int]], **settings: Any) -> list[list[int]]:
    llm = make(path, **settings)
    try:
        return generate(llm, ids)
    finally:
        llm.shutdown()
        torch.cuda.empty_cache()


def oracle_families() -> list[str]:
    """transformers before 5.23 norms the multimodal model's embeddings twice."""
    import transformers

    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    return [f for f in FAMILIES if f != "inkling" or version >= (5, 23)]


@functools.cache
def reference_tokens(family: str) -> list[list[int]]:
    model = tiny_reference(family)  # on the CPU: no other precision, no other kernel
    model.generation_config.eos_token_id = None  # the engine is told to ignore it
    found = []
    for ids in prompts():
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids]),
                max_new_tokens=40,
                do_sample=False,
                pad_token_id=0,
            )
        found.append(out[0, len(ids) :].tolist())
    return found


@pytest.mark.parametrize("family", oracle_families())
def test_greedy_tokens_and_prompt_logprobs_equal_transformers_in_float32(family: str) -> None:
    llm = make(str(tiny_checkpoint(family)))
    assert generate(llm, prompts()) == reference_tokens(family)
    ids = prompts()[0]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (result,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    llm.shutdown()
    with torch.inference_mode():
        logits = tiny_reference(family)(torch.tensor([ids])).logits[0].float()
    want = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].tolist()
    got = [e[t].logprob for e, t in zip(result.prompt_logprobs[1:], ids[1:], strict=True)]
    assert got == pytest.approx(want, abs=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "inkling-text"])
@pytest.mark.parametrize(
    "settings",
    [
        {"enforce_eager": True},
        {"cudagraph_capture_sizes": [8]},
        {"max_num_batched_tokens": 33, "max_num_seqs": 8},
        {"num_gpu_blocks_override": 40},
        {"async_scheduling": False},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_settings_do_not_change_greedy_tokens(family: str, settings: dict[str, Any]) -> None:
    assert run(str(tiny_checkpoint(family)), prompts(), **settings) == reference_tokens(family)


@pytest.mark.parametrize("family", ["llama", "inkling-text"])
def test_a_batch_of_64_and_a_second_time_from_the_cache_give_the_same(family: str) -> None:
    llm = make(str(tiny_checkpoint(family)))
    many = prompts(64)
    whole = generate(llm, many)
    assert whole[: len(LENGTHS)] == reference_tokens(family)
    assert generate(llm, many) == whole
    llm.shutdown()


BFLOAT16_CASES = [
    *((family, "TRITON_ATTN") for family in oracle_families()),
    *((family, "FLASH_ATTN") for family in ("llama", "mistral", "inkling-text")),
]


@pytest.mark.parametrize(("family", "backend"), BFLOAT16_CASES)
def test_prompt_logprobs_equal_transformers_in_bfloat16(family: str, backend: str) -> None:
    """As near to float32 as transformers in bfloat16 is."""
    if backend == "FLASH_ATTN":
        pytest.importorskip("flash_attn.cute")
    wide = {k: v for k, v in WIDE.items() if "inkling" in family or not k.startswith("swa")}
    path = str(tiny_checkpoint(family, **wide))
    ids = prompts()[0]
    llm = make(path, dtype="bfloat16", attention_backend=backend)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (result,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    llm.shutdown()
    got = torch.tensor(
        [e[t].logprob for e, t in zip(result.prompt_logprobs[1:], ids[1:], strict=True)]
    )
    model, index = tiny_reference(family, **wide).cuda(), (range(len(ids) - 1), ids[1:])
    tokens = torch.tensor([ids]).cuda()
    with torch.inference_mode():
        exact = model(tokens).logits[0].float().log_softmax(-1)[index].cpu()
        peer = model.bfloat16()(tokens).logits[0].float().log_softmax(-1)[index].cpu()
    assert (got - exact).abs().mean() < 1.5 * (peer - exact).abs().mean() + 1e-3


def test_memory_does_not_grow_over_many_requests() -> None:
    llm = make(str(tiny_checkpoint("llama")), max_num_seqs=256)
    many = [[5 + i % 400, 7, 9] for i in range(2000)]
    generate(llm, many, 2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        generate(llm, many, 2)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    llm.shutdown()


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_do_not_change_greedy_tokens(num_drafts: int) -> None:
    path = pytest.importorskip("tests.models.inkling.checkpoints").original_checkpoint()
    plain = run(str(path), prompts())
    speculative = {"method": "mtp", "num_speculative_tokens": num_drafts}
    assert run(str(path), prompts(), speculative_config=speculative) == plain
