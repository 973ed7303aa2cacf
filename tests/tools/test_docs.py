# SPDX-License-Identifier: Apache-2.0
"""The documentation says what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.docs import generate
from vllm import envs
from vllm.models.registry import GGUF_ARCHITECTURES, MODELS

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = (ROOT / "docs/models/supported_models.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return SUPPORTED.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("title", "kind"), [("Text", "text"), ("Multimodal", "multimodal"), ("Draft heads", "draft")]
)
def test_the_tables_of_supported_models_are_the_registry(title: str, kind: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", section(title), re.MULTILINE)
    assert rows == [(e.architecture, e.example) for e in MODELS.values() if e.kind == kind]


def test_every_gguf_architecture_is_named() -> None:
    named = re.findall(r"`(\w+)`", section("GGUF").replace("`general.architecture`", ""))
    assert named == list(GGUF_ARCHITECTURES)


def test_every_environment_variable_has_a_row() -> None:
    rows = re.findall(r"^\| `(VLLM_\w+)` ", generate.environment_variables(), re.MULTILINE)
    assert rows == list(envs.VARIABLES)


def test_every_setting_has_a_row_with_a_meaning() -> None:
    page = generate.configuration_reference()
    rows = [line for line in page.splitlines() if line.startswith("| `--")]
    assert len(rows) > 40
    assert all(line.split(" | ")[3].rstrip(" |") for line in rows)
    assert "| `--block-size` | `int \\| None` |  | Tokens in a block" in page


def test_a_findings_template_keeps_the_literal_text(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(
        "raise E(Diagnostic('too-small', f'{a} tokens need {b} GiB', why='because ' 'so',\n"
        "                   exit_code=ExitCode.RESOURCE))"
    )
    assert list(generate.diagnostics(tmp_path)) == [
        ("too-small", "error[too-small]: ... tokens need ... GiB\n  why: because so\nexit status 5")
    ]


def test_error_codes_are_headings_in_order() -> None:
    headings = re.findall(r"^## (.+)$", generate.error_codes(), re.MULTILINE)
    assert headings == sorted(set(headings))
    assert "unsupported-gpu" in headings
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", h) for h in headings)


def test_paths_that_messages_name_are_pages_with_that_heading() -> None:
    pages = generate.pages()
    for path in (ROOT / "vllm").rglob("*.py"):
        for page, anchor in re.findall(r"docs/([\w/]+\.md)(?:#([\w-]+))?", path.read_text("utf-8")):
            file = ROOT / "docs" / page
            text = pages[page] if page in pages else file.read_text(encoding="utf-8")
            titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            slugs = {re.sub(r"[^\w-]+", "-", t.lower()).strip("-") for t in titles}
            assert not anchor or anchor in slugs, f"{path} names {page}#{anchor}"


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "unsupported-gpu" in (tmp_path / "errors" / "index.html").read_text(encoding="utf-8")
