# SPDX-License-Identifier: Apache-2.0
"""What the front end loads before it knows that a model can run: next to nothing.

Each case runs the real command in a process of its own; `-X importtime` tells what it imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {
    "torch",
    "numpy",
    "transformers",
    "fastapi",
    "pydantic",
    "uvicorn",
    "jinja2",
    "prometheus_client",
    "tokenizers",
    "huggingface_hub",
    "rich",
    "openai",
}
# Of the Python interpreter alone: some 35. Measured on 3.11, with room for other versions.
MOST_MODULES = {"import": 80, "cli": 260}
MAIN = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"


def run(code: str, *arguments: str) -> tuple[int, str, set[str]]:
    """Exit status, what was printed, names of the imported modules."""
    finished = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = finished.stderr.splitlines()
    imported = {
        m[1] for line in lines if (m := re.match(r"import time:[\d |]+\|\s+([\w.]+)$", line))
    }
    printed = "\n".join(line for line in lines if not line.startswith("import time:"))
    return finished.returncode, finished.stdout + printed, imported


def heavy(imported: set[str]) -> set[str]:
    return {name.split(".")[0] for name in imported} & HEAVY


def test_importing_the_package_imports_none_of_its_rooms() -> None:
    status, _, imported = run("import vllm")
    assert status == 0
    assert {name for name in imported if name.startswith("vllm")} == {"vllm"}
    assert len(imported) < MOST_MODULES["import"]


def test_public_names_come_without_torch() -> None:
    names = "SamplingParams, RequestOutput, CompletionOutput, EngineArgs, AsyncEngineArgs"
    status, _, imported = run(f"from vllm import {names}")
    assert status == 0
    assert heavy(imported) == set()


COMMANDS = {
    "help": (["--help"], 0, "serve"),
    "version": (["--version"], 0, "."),
    "help of serve": (["serve", "--help"], 0, "--max-model-len"),
    "help of preflight": (["preflight", "--help"], 0, "--json"),
    "help of bench": (["bench", "throughput", "--help"], 0, "--input-len"),
    "a wrong flag": (["serve", "--max-model-length", "8K"], 2, "--max-model-len"),
    "a wrong value": (["serve", "--tensor-parallel-size", "two"], 2, "two"),
    "a wrong choice": (["serve", "--dtype", "int4"], 2, "int4"),
    "a wrong command": (["srve"], 2, "serve"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_answers_without_a_heavy_import(name: str) -> None:
    arguments, expected, text = COMMANDS[name]
    status, printed, imported = run(MAIN, *arguments)
    assert status == expected, printed
    assert text in printed
    assert "Traceback" not in printed
    assert heavy(imported) == set()
    assert len(imported) < MOST_MODULES["cli"], sorted(imported)


def no_model(path: Path) -> Path:
    """A model's directory without a model."""
    path.mkdir()
    return path


def unknown_architecture(path: Path) -> Path:
    """A configuration that the registry does not know."""
    path.mkdir()
    (path / "config.json").write_text('{"architectures": ["LamaForCausalLM"], "vocab_size": 8}')
    return path


REFUSALS = {
    "no model": (no_model, 4, "config.json"),
    "unknown architecture": (unknown_architecture, 4, "LlamaForCausalLM"),
}


@pytest.mark.parametrize("command", ["serve", "preflight"])
@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_comes_without_a_heavy_import(name: str, command: str, tmp_path: Path) -> None:
    make, expected, text = REFUSALS[name]
    status, printed, imported = run(MAIN, command, str(make(tmp_path / "model")))
    assert status == expected, printed
    assert "error[" in printed
    assert text in printed
    assert "Traceback" not in printed
    assert heavy(imported) == set()
