# SPDX-License-Identifier: Apache-2.0
"""The engine on one GPU beside transformers in the same run, random weights.

python benchmarks/gpu_engine.py [--shape llama-8b|qwen3-30b-a3b|inkling-small-8] [--no-peer]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.make_checkpoint import SHAPES
from vllm.models.registry import load_shape_reader, resolve

BATCH, PROMPT, OUTPUT = 64, 512, 128
PEER_OUTPUT = 16


def write_config(shape: str) -> Path:
    """A directory that holds config.json alone."""
    directory = Path(tempfile.mkdtemp(prefix=f"{shape}-"))
    (directory / "config.json").write_text(json.dumps(SHAPES[shape]))
    return directory


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random token ids, different for each prompt."""
    generator = random.Random(seed)
    return [[generator.randrange(vocab) for _ in range(length)] for _ in range(count)]


def active_parameters(config: dict[str, Any]) -> int:
    """Weights of the layers that a token is multiplied with; its embedding and head aside."""
    shape = load_shape_reader(resolve(config["architectures"]))(config)
    chosen = shape.num_experts_per_tok + config.get("n_shared_experts", 0)
    total = 0
    for layer in shape.layers:
        inner = chosen * shape.moe_intermediate_size if layer.is_moe else shape.intermediate_size
        attention = 2 * (layer.num_heads + layer.num_kv_heads) * layer.head_dim
        total += shape.hidden_size * (attention + 3 * inner)
    return total


def timed_generate(llm: Any, ids: list[list[int]], output: int) -> float:
    """Seconds to generate exactly `output` tokens for each prompt."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    torch.cuda.synchronize()
    start = time.perf_counter()
    results = llm.generate([{"prompt_token_ids": p} for p in ids], params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    assert all(len(r.outputs[0].token_ids) == output for r in results)
    return elapsed


def replay_ms(llm: Any, size: int) -> float:
    """Device time of one captured decode step."""
    runner = llm._engine._core.executor._worker.runner
    graph, _, _ = runner.graphs._graphs[size]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(10):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 10


def ours(directory: Path, vocab: int, parameters: float, experts: bool) -> None:
    """Measure the engine; `parameters` are those that a token meets."""
    from vllm import LLM

    start = time.perf_counter()
    llm = LLM(
        str(directory),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=BATCH,
        enable_prefix_caching=False,
    )
    print(f"ours: ready after {time.perf_counter() - start:.1f} s")
    one = prompts(1, 128, vocab, 1)
    for warm_up in (one, prompts(2, PROMPT, vocab, 0), prompts(BATCH, PROMPT, vocab, 6)):
        timed_generate(llm, warm_up, 4)
    first = timed_generate(llm, one, 1)
    single = (timed_generate(llm, one, 257) - first) / 256
    print(f"ours: batch 1 decode {1 / single:.1f} tok/s, {single * 1e3:.2f} ms a token, "
          f"first token {first * 1e3:.0f} ms")  # fmt: skip
    prefill = timed_generate(llm, prompts(BATCH, PROMPT, vocab, 2), 1)
    tflops = 2 * parameters * BATCH * PROMPT / prefill / 1e12
    print(f"ours: prefill {BATCH} x {PROMPT}: {prefill * 1e3:.0f} ms, {tflops:.0f} TFLOP/s")
    ids = prompts(BATCH, PROMPT, vocab, 3)
    short, total = (timed_generate(llm, ids, n) for n in (OUTPUT // 4, OUTPUT))
    step = (total - short) / (OUTPUT - OUTPUT // 4)
    print(f"ours: batch {BATCH} decode {BATCH / step:.0f} tok/s, {step * 1e3:.2f} ms a step; "
          f"whole job {BATCH * OUTPUT / total:.0f} output tok/s")  # fmt: skip
    if not experts:  # a replay repeats one step's routing, and with it the experts that it reads
        device = replay_ms(llm, BATCH)
        print(f"ours: a replay takes {device:.2f} ms; rest of a step "
              f"{(step * 1e3 - device) / (step * 1e3):.1%}")  # fmt: skip
    profile(llm, vocab)
    llm.shutdown()


def profile(llm: Any, vocab: int) -> None:
    """Busy share of the device over a decode run, and the costliest kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA]) as record:
        elapsed = timed_generate(llm, prompts(BATCH, PROMPT, vocab, 5), 32)
    events = record.key_averages()
    busy = sum(e.self_device_time_total for e in events) / 1e6
    print(f"ours: device busy {busy / elapsed:.1%} of a 32-token run of {BATCH}")
    for event in sorted(events, key=lambda e: -e.self_device_time_total)[:14]:
        print(
            f"    {event.self_device_time_total / 1e3:9.2f} ms {event.count:6d}x {event.key[:90]}"
        )


def peer(directory: Path, vocab: int) -> None:
    """Measure transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), dtype=torch.bfloat16
        ).eval()

    def generate(count: int, length: int, output: int) -> float:
        ids = torch.tensor(prompts(count, length, vocab, 4), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids, max_new_tokens=output, min_new_tokens=output, do_sample=False, pad_token_id=0
            )
        torch.cuda.synchronize()
        return time.perf_counter() - start

    generate(1, 128, 2)
    first = generate(1, 128, 1)
    single = (generate(1, 128, 1 + PEER_OUTPUT) - first) / PEER_OUTPUT
    print(f"transformers: batch 1 decode {1 / single:.1f} tok/s, first token {first * 1e3:.0f} ms")
    generate(BATCH, PROMPT, 1)
    prefill = generate(BATCH, PROMPT, 1)
    step = (generate(BATCH, PROMPT, 1 + PEER_OUTPUT) - prefill) / PEER_OUTPUT
    print(f"transformers: prefill {prefill * 1e3:.0f} ms, batch {BATCH} decode "
          f"{BATCH / step:.0f} tok/s")  # fmt: skip


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--no-peer", action="store_true")
    options = parser.parse_args()
    config = SHAPES[options.shape]
    directory = write_config(options.shape)
    experts = "num_experts_per_tok" in config
    ours(directory, config["vocab_size"], active_parameters(config), experts)
    torch.cuda.empty_cache()
    if not options.no_peer:
        peer(directory, config["vocab_size"])


if __name__ == "__main__":
    main()
