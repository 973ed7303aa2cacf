# SPDX-License-Identifier: Apache-2.0
"""How long a refusal takes: the real command line on checkpoints and machines that cannot work.

    python -m benchmarks.fail_fast [--runs 5] [--only NAME] [--trace]

Prints the median wall and CPU time of each case, from command to exit. A case whose exit
status, finding or number of lines differs from what it must be is marked, and the status is 1
then. GPUs are those of tests/nvml_stub; the checkpoints are written into a temporary
directory and their data are holes, so that 975 billion parameters take no disk.
With --trace each case runs once more under strace, which counts the processes that it starts
and tells whether it opens torch or CUDA.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.make_checkpoint import write_tokenizer
from tests.nvml_stub import ROOT, environment
from tests.preflight.checkpoints import write_index, write_safetensors

MAX_LINES = 5
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
INKLING_TEXT: dict[str, Any] = {
    "hidden_size": 6144,
    "num_hidden_layers": 66,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 16,
    "swa_head_dim": 128,
    "sliding_window_size": 512,
    "rel_extent": 1024,
    "d_rel": 16,
    "local_layer_ids": [i for i in range(66) if (i + 1) % 6],
    "dense_intermediate_size": 24576,
    "intermediate_size": 3072,
    "dense_mlp_idx": 2,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "route_scale": 8.0,
    "logits_mup_width_multiplier": 24.0,
    "vocab_size": 201024,
    "unpadded_vocab_size": 200058,
    "sconv_kernel_size": 4,
    "log_scaling_n_floor": 128000,
    "log_scaling_alpha": 0.1,
    "model_max_length": 1048576,
    "inference_moe_w13_interleaved": True,
    "use_embed_norm": True,
    "use_sconv": True,
    "use_gate_bias": True,
    "use_global_scale": True,
    "norm_after_topk": True,
    "shared_expert_sink": True,
    "torch_dtype": "bfloat16",
}
INKLING: dict[str, Any] = {
    "architectures": ["InklingForConditionalGeneration"],
    "model_type": "inkling_mm_model",
    "eos_token_id": 200006,
    "text_config": INKLING_TEXT,
}
NUM_SHARDS = 300


@dataclasses.dataclass(frozen=True)
class Case:
    """One command and what it must end in."""

    name: str
    command: list[str]
    status: int
    finding: str = ""
    """Code of its first error; "" for commands that print what was asked for."""
    machine: str = "no device"


def write_llama(path: Path, changes: dict[str, Any] | None = None) -> Path:
    """A clean checkpoint of two shards; `changes` go to config.json alone."""
    from vllm.models.layouts import expected_tensors

    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**LLAMA, **(changes or {})}))
    write_tokenizer(path, LLAMA["vocab_size"], LLAMA["max_position_embeddings"])
    shapes = expected_tensors(LLAMA, "LlamaForCausalLM")
    write_shards(path, {n: ("BF16", list(s)) for n, s in shapes.items()}, 2)
    return path


def write_inkling(path: Path) -> Path:
    """Inkling's shapes at full size: 975 billion parameters in 300 files of real headers."""
    from vllm.models.inkling.configs import parse_inkling_config
    from vllm.models.inkling.layout import expected_tensors

    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(INKLING))
    write_tokenizer(path, 300, INKLING_TEXT["model_max_length"])
    assert parse_inkling_config(INKLING_TEXT)
    shapes = expected_tensors(INKLING_TEXT, "InklingForConditionalGeneration")
    float32 = ("gate.bias", "gate.global_scale")
    tensors = {n: ("F32" if n.endswith(float32) else "BF16", list(s)) for n, s in shapes.items()}
    write_shards(path, tensors, NUM_SHARDS)
    return path


def write_shards(path: Path, tensors: dict[str, tuple[str, list[int]]], count: int) -> None:
    """`tensors` over `count` files, with an index."""
    names, weight_map = list(tensors), {}
    for number in range(count):
        part = names[number * len(names) // count : (number + 1) * len(names) // count]
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        write_safetensors(path / file, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    write_index(path, weight_map)


def _truncate(path: Path) -> None:
    shard = path / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)


def _remove(*patterns: str) -> Callable[[Path], None]:
    def remove(path: Path) -> None:
        for pattern in patterns:
            for file in path.glob(pattern):
                file.unlink()

    return remove


def _reshape(path: Path) -> None:
    from vllm.models.layouts import expected_tensors

    shapes = expected_tensors(LLAMA, "LlamaForCausalLM")
    tensors = {name: ("BF16", list(shape)) for name, shape in shapes.items()}
    tensors["model.layers.1.mlp.down_proj.weight"] = ("BF16", [256, 767])
    write_shards(path, tensors, 2)


def make_cases(root: Path) -> list[Case]:
    """Write every checkpoint under `root`; the cases in the order of the table."""

    def serve(name: str, path: Path | str, *flags: str, **more: Any) -> Case:
        command = ["serve", str(path), "--port", "0", *flags]
        return Case(name, command, more.pop("status", 4), **more)

    def broken(name: str, finding: str, spoil: Callable[[Path], None]) -> Case:
        path = write_llama(root / name.replace(" ", "-"))
        spoil(path)
        return serve(name, path, finding=finding)

    good, inkling = write_llama(root / "good"), write_inkling(root / "inkling")
    fp8 = write_llama(
        root / "fp8",
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
    )
    typed = ["--tensor-parallel-size", "2", "--tokenizer-mode", "inkling", "--trust-remote-code"]
    two = "2x RTX PRO 6000"
    return [
        serve(
            "Inkling on SM120", inkling, *typed, status=3, finding="unsupported-gpu", machine=two
        ),
        serve("missing directory", root / "nowhere", finding="model-missing"),
        broken("no config.json", "config-missing", _remove("config.json")),
        broken("broken JSON", "config-broken", lambda p: _write(p / "config.json", '{"a": ')),
        serve(
            "unknown architecture",
            write_llama(root / "unknown", {"architectures": ["LamaForCausalLM"]}),
            finding="architecture-unknown",
        ),
        serve("TP 3 on 16 heads", good, "-tp", "3", finding="tensor-parallel-size"),
        serve("length beyond positions", good, "--max-model-len", "4096", finding="max-model-len"),
        serve("unknown quantization", good, "-q", "int3", status=2, finding="quantization-unknown"),
        broken("no weights", "weights-missing", _remove("*.safetensors*")),
        broken("truncated shard", "weights-truncated", _truncate),
        broken("tensor of a wrong shape", "tensor-shape", _reshape),
        serve(
            "fewer layers than config",
            write_llama(root / "layers", {"num_hidden_layers": 6}),
            finding="tensor-missing",
        ),
        serve("FP8 on V100", fp8, status=3, finding="quantization-unsupported", machine="V100"),
        serve(
            "TP 8 without GPUs",
            good,
            "--device",
            "cuda",
            "-tp",
            "8",
            status=3,
            finding="no-visible-device",
        ),
        broken("no tokenizer", "tokenizer-missing", _remove("tokenizer*")),
        Case("wrong flag", ["serve", str(good), "--no-such-flag", "2"], 2, "unknown-option"),
        Case("--help", ["--help"], 0),
        Case("serve --help", ["serve", "--help"], 0),
        Case("--version", ["--version"], 0),
        Case("import vllm", ["-c", "import vllm"], 0),
        Case("from vllm import LLM", ["-c", "from vllm import LLM"], 0),
        Case(
            f"preflight of 975B in {NUM_SHARDS} shards",
            ["preflight", str(inkling), "--device", "8xGB300", "-tp", "8", "--skip-tokenizer-init"],
            0,
        ),
    ]


def _write(file: Path, text: str) -> None:
    file.write_text(text)


def command_line(case: Case) -> list[str]:
    """argv of a case's process."""
    if case.command[0] == "-c":
        return [sys.executable, *case.command]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", *case.command]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run: seconds, and what is wrong with how it ended."""

    wall_s: float
    cpu_s: float
    complaint: str


def run_once(case: Case) -> Outcome:
    """Run a case to its end."""
    env = {**environment(case.machine), "VLLM_LOGGING_LEVEL": "ERROR"}
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(
        command_line(case), env=env, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    wall, after = time.perf_counter() - start, os.times()
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    return Outcome(wall, cpu, _complaint(case, done))


def _complaint(case: Case, done: subprocess.CompletedProcess[str]) -> str:
    found = re.findall(r"^error\[([\w-]+)\]", done.stderr, re.MULTILINE)
    first = found[0] if found else ""
    if done.returncode != case.status or first != case.finding:
        return f"ended with {done.returncode} and {found}, not {case.status} and {case.finding!r}"
    if "Traceback" in done.stderr:
        return "printed a traceback"
    findings = len(re.findall(r"^(?:error|warning|info)\[", done.stderr, re.MULTILINE))
    lines = len(done.stderr.splitlines())
    return f"{lines} lines for {findings} findings" if lines > MAX_LINES * findings else ""


def trace(case: Case) -> str:
    """Processes started and libraries opened, by strace."""
    with tempfile.NamedTemporaryFile("r") as log:
        subprocess.run(
            ["strace", "-fqo", log.name, "-e", "trace=process,openat", *command_line(case)],
            env={**environment(case.machine), "VLLM_LOGGING_LEVEL": "ERROR"},
            cwd=ROOT,
            capture_output=True,
        )
        calls = log.read()
    started = len(re.findall(r" v?fork\(| clone3?\(", calls))
    opened = [
        name for name in ("torch/__init__.", "libtorch", "libcuda.", "libcudart") if name in calls
    ]
    return f"{started} started, {' '.join(opened) or 'neither torch nor CUDA'} opened"


def main() -> int:
    """Command line; 1 if a case ended otherwise than it must."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="runs of each case")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--trace", action="store_true", help="count processes with strace")
    arguments = parser.parse_args()
    if arguments.trace and shutil.which("strace") is None:
        parser.error("--trace needs strace")
    wrong = 0
    print(f"{'case':34}{'wall s':>8}{'CPU s':>8}")
    with tempfile.TemporaryDirectory(prefix="fail-fast-") as root:
        for case in make_cases(Path(root)):
            if arguments.only not in case.name:
                continue
            runs = [run_once(case) for _ in range(arguments.runs)]
            wall = statistics.median(run.wall_s for run in runs)
            cpu = statistics.median(run.cpu_s for run in runs)
            notes = sorted({run.complaint for run in runs} - {""})
            wrong += bool(notes)
            notes += [trace(case)] if arguments.trace else []
            print(f"{case.name:34}{wall:8.3f}{cpu:8.3f}  {'; '.join(notes)}".rstrip(), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
