# SPDX-License-Identifier: Apache-2.0
"""What a user sees, and what the system sees, when `vllm serve` refuses: whole processes, traced.

The cases are the rows of the project's table of start-up failures; what each one can find is
tested finding by finding in tests/preflight.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nvml_stub import ROOT, environment
from tests.preflight.checkpoints import Model, header_of

Spoil = Callable[[Model], None]


def remove(*names: str) -> Spoil:
    return lambda model: [(model.path / name).unlink() for name in names] and None


def broken_json(model: Model) -> None:
    (model.path / "config.json").write_text('{"a": ')


def cut(model: Model) -> None:
    weights = model.path / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)


def reshape(model: Model) -> None:
    model.tensors["model.norm.weight"] = ("BF16", [255])
    model.write()


def config(**values: object) -> Spoil:
    return lambda model: model.set(**values)


def as_it_is(model: Model) -> None:
    pass


# name: (what is done to the checkpoint, flags, machine, exit status, exact set of codes)
CASES: dict[str, tuple[Spoil, str, str, int, set[str]]] = {
    "no config.json": (remove("config.json"), "", "no device", 4, {"config-missing"}),
    "broken JSON": (broken_json, "", "no device", 4, {"config-broken"}),
    "unknown architecture": (
        config(architectures=["LamaForCausalLM"]),
        "",
        "no device",
        4,
        {"architecture-unknown"},
    ),
    "three ranks for 16 heads": (as_it_is, "-tp 3", "no device", 4, {"tensor-parallel-size"}),
    "length beyond the positions": (
        as_it_is,
        "--max-model-len 4096",
        "no device",
        4,
        {"max-model-len"},
    ),
    "unknown quantization": (as_it_is, "-q int3", "no device", 2, {"quantization-unknown"}),
    "no weights": (remove("model.safetensors"), "", "no device", 4, {"weights-missing"}),
    "truncated file": (cut, "", "no device", 4, {"weights-truncated"}),
    "wrong shape": (reshape, "", "no device", 4, {"tensor-shape"}),
    "fewer layers": (config(num_hidden_layers=3), "", "no device", 4, {"tensor-missing"}),
    "FP8 on a V100": (
        config(quantization_config={"quant_method": "fp8"}),
        "",
        "V100",
        3,
        {"quantization-unsupported", "torch-without-cuda"},
    ),
    "eight ranks, one GPU": (
        as_it_is,
        "-tp 8",
        "H200",
        3,
        {"too-few-devices", "torch-without-cuda"},
    ),
    "no tokenizer": (remove("tokenizer.json"), "", "no device", 4, {"tokenizer-missing"}),
    "three things at once": (
        remove("tokenizer.json"),
        "--max-model-len 4096 --host 203.0.113.7",
        "no device",
        4,
        {"tokenizer-missing", "max-model-len", "host-unusable"},
    ),
    "wrong flag": (as_it_is, "--tensor-parallel 2", "no device", 2, {"unknown-option"}),
}


@functools.cache
def strace() -> str | None:
    """The tracer, where it may trace."""
    found = shutil.which("strace")
    if found is None or subprocess.run([found, "-qo", os.devnull, "true"]).returncode:
        return None
    return found


@functools.cache
def torch_drives_gpus() -> bool:
    """Whether the torch installed here is a CUDA build, which decides one finding."""
    from vllm.preflight.environment import torch_cuda_version

    return torch_cuda_version() != "none"


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_is_short_and_touches_nothing(name: str, tmp_path: Path) -> None:
    tracer = strace()
    if tracer is None:
        pytest.skip("needs an strace that may trace")
    spoil, flags, machine, status, codes = CASES[name]
    model = Model(tmp_path)
    spoil(model)
    log = tmp_path / "trace"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model.path)]
    traced = "trace=process,openat,read,pread64,mmap,connect"
    done = subprocess.run(
        [tracer, "-f", "-y", "-qo", str(log), "-e", traced, *command, "--port", "0"]
        + flags.split(),
        env=environment(machine, VLLM_LOGGING_LEVEL="ERROR"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if torch_drives_gpus():
        codes = codes - {"torch-without-cuda"}
    assert (done.returncode, codes_in(done.stderr)) == (status, codes), done.stderr
    check_output(done)
    check_trace(log.read_text(), model, codes <= {"weights-truncated", "tensor-shape"})


def codes_in(told: str) -> set[str]:
    return set(re.findall(r"^(?:error|warning|info)\[([\w-]+)\]: ", told, re.MULTILINE))


def check_output(done: subprocess.CompletedProcess[str]) -> None:
    """Findings of at most five lines, and nothing else, on standard error alone."""
    assert done.stdout == "" and done.stderr.isascii()
    assert "Traceback" not in done.stderr
    findings = re.split(r"^(?=(?:error|warning|info)\[)", done.stderr, flags=re.MULTILINE)
    assert findings[0] == ""
    for finding in findings[1:]:
        labels = [line.split(":")[0] for line in finding.splitlines()[1:]]
        assert labels == [la for la in ("  why", "  where", "  fix", "  see") if la in labels]
        assert len(finding.splitlines()) <= 5


def check_trace(calls: str, model: Model, looks_at_weights: bool) -> None:
    """One process; no torch, no CUDA, no connection; of the weights the headers alone."""
    assert len(re.findall(r"execve\(", calls)) == 1
    assert not re.findall(r" v?fork\(| clone3?\(", calls)
    assert not re.findall(r"connect\([^)]*AF_INET", calls)
    opened = re.findall(r'openat\([^"]*"([^"]*)"[^=]*= \d', calls)
    assert any(f.endswith("/vllm/entrypoints/cli/main.py") or "main.cpython" in f for f in opened)
    for file in opened:
        assert not re.search(r"libcuda\.|libcudart|libtorch|/numpy/|/transformers/", file), file
        assert "/torch/" not in file or file.endswith("/torch/version.py"), file
    read = re.findall(r"(?:read|pread64)\(\d+<[^>]*\.safetensors>.*= (\d+)$", calls, re.MULTILINE)
    assert sum(map(int, read)) <= len(header_of(model.tensors)[0])
    if looks_at_weights:
        assert read
    assert not re.findall(r"mmap\([^\n]*\.safetensors>", calls)


def test_a_missing_directory_names_where_the_path_ends(tmp_path: Path) -> None:
    done = serve(str(tmp_path / "no" / "where"))
    assert done.returncode == 4
    assert codes_in(done.stderr) == {"model-missing"}
    assert f"the path exists up to {tmp_path}" in done.stderr


def test_standard_input_is_never_asked(tmp_path: Path) -> None:
    """A tokenizer that is code: the answer is a finding, not a question at a terminal."""
    model = Model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('ran')")
    config_file = tmp_path / "tokenizer_config.json"
    config_file.write_text('{"auto_map": {"AutoTokenizer": ["tokenization_own.Own", null]}}')
    done = serve(str(model.path))
    assert done.returncode == 4
    assert codes_in(done.stderr) >= {"tokenizer-remote-code"}
    assert "tokenization_own.py" in done.stderr and "ran" not in done.stderr.split()


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments, "--port", "0"],
        env=environment("no device", VLLM_LOGGING_LEVEL="ERROR"),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
