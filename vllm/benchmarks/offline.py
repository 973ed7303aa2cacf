# SPDX-License-Identifier: Apache-2.0
"""Offline measurements with `LLM`, and how near they come to the device's limits."""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Different prompts of random token ids."""
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def _make(engine: EngineArgs) -> LLM:
    settings = {"skip_tokenizer_init": True, **engine.settings}
    if engine.speculative_config is not None:
        settings["speculative_config"] = engine.speculative_config
    return LLM(**settings)


def _params(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)


def _generate(llm: LLM, prompts: list[list[int]], output_len: int) -> float:
    start = time.perf_counter()
    llm.generate(prompts, _params(output_len), use_tqdm=False)
    return time.perf_counter() - start


def throughput(args: argparse.Namespace, engine: EngineArgs) -> dict[str, Any]:
    """All prompts at once."""
    llm = _make(engine)
    vocab_size = llm.vllm_config.model_config.shape.sampled_vocab_size
    _generate(llm, random_prompts(1, args.input_len, vocab_size, 1), 2)
    prompts = random_prompts(args.num_prompts, args.input_len, vocab_size)
    first = _generate(llm, random_prompts(args.num_prompts, args.input_len, vocab_size, 2), 1)
    seconds = _generate(llm, prompts, args.output_len)
    output = args.num_prompts * args.output_len
    result = {
        "elapsed_s": seconds,
        "requests_per_second": args.num_prompts / seconds,
        "output_tokens_per_second": output / seconds,
        "total_tokens_per_second": (output + args.num_prompts * args.input_len) / seconds,
        "prefill_tokens_per_second": args.num_prompts * args.input_len / first,
    }
    if args.output_len > 1:
        running = min(args.num_prompts, llm.vllm_config.scheduler_config.max_num_seqs)
        length = args.input_len + args.output_len // 2
        step_s = (seconds - first) / (args.output_len - 1) * running / args.num_prompts
        result.update(_limits(llm, step_s, running, length, args, first))
    llm.shutdown()
    return result


def latency(args: argparse.Namespace, engine: EngineArgs) -> dict[str, Any]:
    """One batch, several times."""
    llm = _make(engine)
    vocab_size = llm.vllm_config.model_config.shape.sampled_vocab_size
    _generate(llm, random_prompts(args.batch_size, args.input_len, vocab_size, 99), 2)
    first, whole = [], []
    for seed in range(args.num_iters):
        prompts = random_prompts(args.batch_size, args.input_len, vocab_size, seed)
        first.append(_generate(llm, prompts, 1))
        prompts = random_prompts(args.batch_size, args.input_len, vocab_size, 1000 + seed)
        whole.append(_generate(llm, prompts, args.output_len))
    first_s, whole_s = sorted(first)[len(first) // 2], sorted(whole)[len(whole) // 2]
    result: dict[str, Any] = {"first_token_ms": first_s * 1e3, "latency_ms": whole_s * 1e3}
    if args.output_len > 1:
        step_s = (whole_s - first_s) / (args.output_len - 1)
        result["ms_per_token"] = step_s * 1e3
        result["output_tokens_per_second"] = args.batch_size / step_s
        length = args.input_len + args.output_len // 2
        result.update(_limits(llm, step_s, args.batch_size, length, args, first_s))
    llm.shutdown()
    return result


def startup(args: argparse.Namespace, engine: EngineArgs) -> dict[str, Any]:
    """From the configuration to a warm engine; the first one also imports torch."""
    times = []
    for _ in range(args.num_iters):
        start = time.perf_counter()
        _make(engine).shutdown()
        times.append(time.perf_counter() - start)
    return {"first_start_s": times[0], "median_start_s": sorted(times)[len(times) // 2]}


def _limits(
    llm: LLM, step_s: float, batch: int, length: int, args: argparse.Namespace, first_s: float
) -> dict[str, Any]:
    """Shares of the measured copy rate (decode) and matrix rate (prefill)."""
    import torch

    config = llm.vllm_config
    device = torch.device("cuda" if config.device_config.kind != "cpu" else "cpu")
    dtype = getattr(torch, config.model_config.resolved_dtype)
    weights = _weights_read(llm)
    tp = config.parallel_config.tensor_parallel_size
    row_bytes = sum(
        layer.num_kv_heads * layer.head_dim * 2 * config.model_config.dtype_bytes
        * min(length, layer.window or length)
        for layer in config.model_config.shape.layers
    )  # fmt: skip
    read = (weights * config.model_config.dtype_bytes + batch * row_bytes) / tp
    prefill_flops = 2 * weights * batch * args.input_len / tp
    return {
        "decode_step_ms": step_s * 1e3,
        "decode_gb_per_second": read / step_s / 1e9,
        "share_of_copy_rate": read / step_s / copy_rate(device),
        "prefill_tflops": prefill_flops / first_s / 1e12,
        "share_of_matrix_rate": prefill_flops / first_s / matrix_rate(device, dtype),
    }


def _weights_read(llm: LLM) -> float:
    """Values of the matrices that one token goes through; of the experts the chosen ones."""
    shape = llm.vllm_config.model_config.shape
    total = shape.vocab_size * shape.hidden_size
    for layer in shape.layers:
        heads = 2 * (layer.num_heads + layer.num_kv_heads) * layer.head_dim
        inner = (
            shape.num_experts_per_tok * shape.moe_intermediate_size
            if layer.is_moe
            else shape.intermediate_size
        )
        total += shape.hidden_size * (heads + 3 * inner)
    return float(total)


def copy_rate(device: Any) -> float:
    """Bytes a second of a copy on the device, read and written."""
    import torch

    size = 1 << (31 if device.type == "cuda" else 28)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), device)


def matrix_rate(device: Any, dtype: Any) -> float:
    """Operations a second of a large product."""
    import torch

    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / _best(lambda: a @ a, device)


def _best(call: Any, device: Any) -> float:
    import torch

    times = []
    for _ in range(6):
        if device.type == "cuda":
            torch.accelerator.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
