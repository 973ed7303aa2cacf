# SPDX-License-Identifier: Apache-2.0
"""Findings that need more than a spoilt safetensors directory: GGUF, formats, clients, Python."""

from __future__ import annotations

import http.server
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny_models import tiny_checkpoint
from tests.nvml_stub import run_vllm
from tests.preflight.checkpoints import Model, gguf_file
from tests.preflight.test_codes import PACKAGE
from vllm.config.hub import resolve_model
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli import serve
from vllm.entrypoints.cli.main import main
from vllm.errors import ConfigError, UsageError
from vllm.preflight.codes import CODES
from vllm.tokenizers.chat_template import ChatTemplate


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, set[str], str]:
    """Exit status, codes and text of a command."""
    status = main([*arguments, "--port", "0"])
    text = capsys.readouterr().err
    return status, set(re.findall(r"^(?:error|warning|info)\[([\w-]+)\]", text, re.M)), text


GGUF: dict[str, tuple[dict[str, Any], int, set[str]]] = {
    "as it is": ({}, 0, set()),
    "another known way of splitting": ({"pre": "qwen2"}, 0, set()),
    "an unknown way of splitting": ({"pre": "own"}, 4, {"gguf-tokenizer"}),
    "an unknown kind": ({"model": "t5"}, 4, {"gguf-tokenizer"}),
    "a vocabulary as large as the embedding": ({"tokens": 16}, 0, set()),
    "a vocabulary beyond the embedding": ({"tokens": 17}, 4, {"tokenizer-vocabulary"}),
    "no template": ({"template": False}, 0, {"chat-template-missing"}),
    "a missing tensor": ({"drop": "blk.0.ffn_up.weight"}, 4, {"tensor-missing"}),
    "a wrong shape": ({"shape": {"output_norm.weight": (31,)}}, 4, {"tensor-shape"}),
    "a tensor that nobody reads": ({"shape": {"blk.0.attn_rot.weight": (3,)}}, 0, set()),
}


@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, status, codes = GGUF[name]
    file = gguf_file(tmp_path / "m.gguf", **changes)
    assert told(capsys, "preflight", str(file))[:2] == (status, codes)


def test_a_gguf_tensor_of_an_unknown_format_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = gguf_file(tmp_path / "m.gguf")
    content = bytearray(file.read_bytes())
    name = b"output_norm.weight"
    kind = content.index(name) + len(name) + 4 + 8  # one dimension and its length before it
    content[kind : kind + 4] = (16).to_bytes(4, "little")  # IQ2_XXS
    file.write_bytes(content)
    status, codes, text = told(capsys, "preflight", str(file))
    assert (status, codes) == (4, {"gguf-type"})
    assert "'output_norm.weight'" in text and "ggml type 16" in text


def test_a_gguf_file_beside_safetensors_is_not_read_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Model(tmp_path)
    (tmp_path / "model-Q4.gguf").write_bytes(b"GGUF")
    status, codes, text = told(capsys, "preflight", str(tmp_path))
    assert (status, codes) == (0, {"weights-two-formats"})
    assert f"name {tmp_path}/model-Q4.gguf" in text


def test_a_link_that_leads_nowhere_is_unreadable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    status, codes, text = told(capsys, "preflight", str(model.path))
    assert (status, codes) == (4, {"weights-unreadable"})
    assert "No such file" in text


def test_a_file_of_another_kind_is_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert told(capsys, "preflight", str(file))[:2] == (4, {"model-file"})


def test_a_broken_json_file_beside_config_json_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Model(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    status, codes, text = told(capsys, "preflight", str(tmp_path))
    assert (status, codes) == (4, {"json-broken"}) and "generation_config.json" in text


@pytest.mark.parametrize(("number", "codes"), [(3, set()), (4, {"speculative-tokens"})])
def test_drafts_beyond_the_heads_depths(
    number: int, codes: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_checkpoint("inkling"))
    drafts = f'{{"num_speculative_tokens": {number}}}'
    found = told(
        capsys, "preflight", model, "--speculative-config", drafts, "--load-format", "dummy"
    )
    assert found[1] == codes


def test_no_model_and_no_embedded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.config.hub.EMBEDDED_PACKAGE", "llm_that_is_not_installed")
    with pytest.raises(ConfigError) as caught:
        resolve_model("")
    assert caught.value.findings[0].code == "model-not-given"


def test_a_misspelt_keyword_names_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        EngineArgs("m", tensor_parallel=2)
    (found,) = caught.value.findings
    assert found.code == "unknown-argument" and "tensor_parallel_size" in found.why


def test_gpus_that_are_hidden_are_counted(tmp_path: Path) -> None:
    model = Model(tmp_path)
    done = run_vllm(
        "serve", str(model.path), "--port", "0", "--device", "cuda",
        machine="2x H200", CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert done.returncode == 3
    assert "error[no-visible-device]: no GPU is visible" in done.stderr
    assert "CUDA_VISIBLE_DEVICES='' chooses from 2 present" in done.stderr


def test_a_port_that_needs_privileges(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever runs the tests may have them: the kernel's answer is given in its place."""

    class Socket(socket.socket):
        def bind(self, address: Any) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(serve.socket, "socket", Socket)
    status = main(["serve", str(tiny_checkpoint("llama")), "--port", "80"])
    assert status == 5 and "error[port-forbidden]" in capsys.readouterr().err


def test_a_client_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        status = main(["complete", "--url", url, "--quick", "a"])
    text = capsys.readouterr().err
    assert status == 5 and text.startswith("error[server-unreachable]")
    assert "Traceback" not in text and len(text.splitlines()) <= 5


def test_a_server_that_refuses_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "wrong key"}}')

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        status = main(["complete", "--url", url, "--quick", "a"])
        server.shutdown()
    text = capsys.readouterr().err
    assert status == 5 and text.startswith("error[server-refused]") and "wrong key" in text


def test_a_template_that_does_not_parse_names_the_line() -> None:
    with pytest.raises(ConfigError) as caught:
        ChatTemplate("{{ messages }}\n{% if %}")
    (found,) = caught.value.findings
    assert found.code == "chat-template" and "in line 2" in found.why


@pytest.mark.parametrize("mode", ["inkling", "auto", "hf"])
def test_inklings_chat_format_wants_its_tokens(
    mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = str(tiny_checkpoint("inkling"))
    status, codes, text = told(capsys, "preflight", plain, "--tokenizer-mode", mode)
    wanted = (4, {"inkling-tokens"}) if mode == "inkling" else (0, set())
    assert (status, codes) == wanted
    assert ("<|message_user|>" in text) == (mode == "inkling")


def test_a_directory_is_no_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Model(tmp_path)
    found = told(capsys, "preflight", str(tmp_path), "--load-format", "gguf")
    assert found[:2] == (2, {"load-format"})


def test_every_code_is_named_by_a_test() -> None:
    text = "\n".join(p.read_text() for p in (PACKAGE.parent / "tests").rglob("test_*.py"))
    assert [c for c in CODES if not re.search(rf"(?<![\w-]){c}(?![\w-])", text)] == []
