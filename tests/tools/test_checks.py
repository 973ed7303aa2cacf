# SPDX-License-Identifier: Apache-2.0
"""The small house-rule checks, each on a case that breaks the rule and one that keeps it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools.pre_commit import check_boolean_with, check_config_fields, check_spdx, check_torch_cuda
from tools.pre_commit.source import Check

ROOT = Path(__file__).resolve().parents[2]


def lines(check: Check, path: str, source: str) -> list[int]:
    return [line for line, _ in check(path, ast.parse(source))]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("with a and b:\n    pass", [1]),
        ("async def f():\n    async with x, (a or b) as c:\n        pass", [2]),
        ("with a, b:\n    pass", []),
        ("with f(a and b):\n    pass", []),
    ],
)
def test_a_boolean_operator_in_a_with_statement_is_found(source: str, found: list[int]) -> None:
    assert lines(check_boolean_with.check, "vllm/x.py", source) == found


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("vllm/layers/moe.py", "x = 1\ny = torch.cuda.is_available()", [2]),
        ("vllm/layers/moe.py", "from torch.cuda import Stream", [1]),
        ("vllm/layers/moe.py", "import torch.cuda.nvtx", [1]),
        ("vllm/worker/cuda_graph.py", "torch.cuda.synchronize()", []),
        ("tests/x.py", "torch.cuda.synchronize()", []),
        ("vllm/layers/moe.py", "'torch.cuda is named in a text'", []),
    ],
)
def test_torch_cuda_is_found_outside_of_its_owners(
    path: str, source: str, found: list[int]
) -> None:
    assert lines(check_torch_cuda.check, path, source) == found


CONFIG = """
@dataclasses.dataclass
class XConfig:
    good: int = 1
    '''What it means.'''
    no_default: int
    '''What it means.'''
    no_doc: int = 1
    filled_in: int = derived()
    hint: ClassVar[int] = 1
    last: int = 2
"""


def test_a_config_field_without_default_or_docstring_is_found() -> None:
    assert lines(check_config_fields.check, "vllm/config/x.py", CONFIG) == [6, 8, 11]
    assert lines(check_config_fields.check, "vllm/engine/x.py", CONFIG) == []


def test_the_licence_is_looked_for_in_the_first_two_lines() -> None:
    header = f"# {check_spdx.HEADER}"
    assert check_spdx.has_header(f"#!/bin/sh\n{header}\n")
    assert check_spdx.has_header("")
    assert not check_spdx.has_header(f"import os\n\n{header}\n")


@pytest.mark.parametrize(
    ("module", "file", "text"),
    [
        ("check_file_names", "a b.py", ""),
        ("check_spdx", "bare.py", "x = 1\n"),
        ("check_boolean_with", "bad.py", "with a and b:\n    pass\n"),
    ],
)
def test_a_hook_fails_and_names_the_file(tmp_path: Path, module: str, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)
    finished = subprocess.run(
        [sys.executable, "-m", f"tools.pre_commit.{module}", str(tmp_path / file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 1
    assert file in finished.stdout
