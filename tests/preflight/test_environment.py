# SPDX-License-Identifier: Apache-2.0
"""Tokenizer, chat template, host limits and installed torch: each finding and its near miss."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import json
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm.preflight import environment
from vllm.preflight.environment import (
    check_chat_template,
    check_host,
    check_tokenizer,
    check_torch,
    torch_cuda_version,
)


def tokenizer_json(directory: Path, vocab: dict[str, int], added: list[int]) -> None:
    content = {
        "model": {"type": "BPE", "vocab": vocab},
        "added_tokens": [{"id": i, "content": f"<{i}>"} for i in added],
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))


def test_a_directory_without_tokenizer_lists_what_was_looked_for(tmp_path: Path) -> None:
    (found,) = check_tokenizer(str(tmp_path), 10)
    assert found.code == "tokenizer-missing" and "tokenizer.json" in found.why
    assert "--skip-tokenizer-init" in found.fix


def test_a_tokenizer_that_is_code_asks_for_trust(tmp_path: Path) -> None:
    (tmp_path / "tokenization_x.py").write_text("")
    config = {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (found,) = check_tokenizer(str(tmp_path), 10)
    assert found.code == "tokenizer-remote-code" and "tokenization_x.py" in found.why


def test_ids_must_fit_the_embedding_exactly(tmp_path: Path) -> None:
    tokenizer_json(tmp_path, {"a": 0, "b": 8}, [9])
    assert check_tokenizer(str(tmp_path), 10) == []
    (found,) = check_tokenizer(str(tmp_path), 8)
    assert (found.severity, found.code) == ("error", "tokenizer-vocabulary")
    assert "ids up to 8, the embedding ends at 7" in found.subject


def test_an_added_token_without_a_row_is_a_warning(tmp_path: Path) -> None:
    """Models that were tuned with a [PAD] of their own run; only prompts with it cannot."""
    tokenizer_json(tmp_path, {"a": 0, "b": 8, "<9>": 9}, [9])
    (found,) = check_tokenizer(str(tmp_path), 9)
    assert (found.severity, found.code) == ("warning", "tokenizer-vocabulary")
    assert found.subject == "prompts with <9> will be refused"


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"vocab": {"a": "x"}}}', "null"])
def test_a_broken_tokenizer_is_one_finding(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert [d.code for d in check_tokenizer(str(tmp_path), 10)] == ["tokenizer-broken"]


def test_the_template_is_found_wherever_it_may_lie(tmp_path: Path) -> None:
    (found,) = check_chat_template(str(tmp_path), None)
    assert (found.severity, found.code) == ("warning", "chat-template-missing")
    assert check_chat_template(str(tmp_path), "x.jinja") == []
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ 1 }}"}')
    assert check_chat_template(str(tmp_path), None) == []
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("{{ 1 }}")
    assert check_chat_template(str(tmp_path), None) == []


def test_more_requests_than_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert check_host(1, 128) == []
    (found,) = check_host(1, 4000)
    assert found.code == "open-files" and "can take 9,024" in found.why


def test_small_shared_memory_matters_to_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    small = SimpleNamespace(f_bavail=16 << 8, f_frsize=4096)
    monkeypatch.setattr(environment.os, "statvfs", lambda _: small)
    assert check_host(1, 1) == []
    (found,) = check_host(2, 1)
    assert found.code == "shared-memory" and found.subject == "/dev/shm has 16 MiB free"


def installed_torch(monkeypatch: pytest.MonkeyPatch, directory: Path, cuda: str) -> None:
    (directory / "version.py").write_text(f"from typing import Optional\n{cuda}\nhip = None\n")
    origin = str(directory / "__init__.py")
    spec = importlib.machinery.ModuleSpec("torch", None, origin=origin)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)


def test_torchs_cuda_version_is_read_and_not_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for line, version in (
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = None", "none"),
        ("rocm = '7'", None),
    ):
        installed_torch(monkeypatch, tmp_path, line)
        assert torch_cuda_version() == version


def test_the_real_torch_here_says_what_torch_itself_says() -> None:
    import torch

    assert torch_cuda_version() == (torch.version.cuda or "none")


def test_a_driver_older_than_torch_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed_torch(monkeypatch, tmp_path, "cuda: Optional[str] = '13.0'")
    (found,) = check_torch("cuda", (12, 8))
    assert found.code == "driver-too-old" and "CUDA 12.8" in found.subject
    assert check_torch("cuda", (13, 0)) == check_torch("cuda", None) == []
    assert check_torch("cpu", (12, 8)) == []


def test_a_cpu_torch_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed_torch(monkeypatch, tmp_path, "cuda: Optional[str] = None")
    (found,) = check_torch("cuda", None)
    assert (found.code, int(found.exit_code)) == ("torch-without-cuda", 3)


def test_no_process_is_forked() -> None:
    """A fork of a process that has initialised CUDA, such as a notebook's, cannot use it."""
    package = Path(environment.__file__).parents[1]
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in ("os.fork", "multiprocessing.Process", "mp.Process"), file
                if name.endswith("get_context"):
                    assert ast.unparse(node.args[0]) == "'spawn'", file
