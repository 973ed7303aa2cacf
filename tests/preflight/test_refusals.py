# SPDX-License-Identifier: Apache-2.0
"""Each thing that can be known before loading: provoked once, and a near miss that passes."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny_models import FAMILIES, tiny_checkpoint
from tests.preflight.checkpoints import LLAMA, Model, write_index, write_safetensors
from vllm.entrypoints.cli.main import main
from vllm.models.layouts import expected_tensors


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


def preflight(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Exit status and the codes of the findings, from the JSON that machines read."""
    status = main(["preflight", *arguments, "--json", "--port", "0"])
    out = capsys.readouterr().out
    report = json.loads(out)
    assert report["exit_code"] == status
    assert (report["plan"] is None) == (status != 0)
    for finding in report["findings"]:
        told = [finding[k] for k in ("subject", "why", "where", "fix", "see") if finding[k]]
        assert len(told) <= 5 and all(t.isascii() and "\n" not in t for t in told)
    return status, [f["code"] for f in report["findings"]]


H200 = ["--device", "H200"]
Spoil = Callable[[Model], list[str]]


def remove(name: str) -> Spoil:
    def spoil(model: Model) -> list[str]:
        (model.path / name).unlink()
        return []

    return spoil


def write(name: str, content: bytes) -> Spoil:
    def spoil(model: Model) -> list[str]:
        (model.path / name).write_bytes(content)
        return []

    return spoil


def config(**values: Any) -> Spoil:
    def spoil(model: Model) -> list[str]:
        model.set(**values)
        return []

    return spoil


def flags(*arguments: str) -> Spoil:
    return lambda model: list(arguments)


def drop_tensor(model: Model) -> list[str]:
    del model.tensors["model.norm.weight"]
    model.write()
    return []


def reshape_tensor(model: Model) -> list[str]:
    model.tensors["model.norm.weight"] = ("BF16", [255])
    model.write()
    return []


def cut(model: Model) -> list[str]:
    os.truncate(
        model.path / "model.safetensors", os.path.getsize(model.path / "model.safetensors") - 1
    )
    return []


def missing_shard(model: Model) -> list[str]:
    names = dict.fromkeys(model.tensors, "model.safetensors")
    drop_tensor(model)
    write_index(model.path, {**names, "model.norm.weight": "other.safetensors"})
    return []


REFUSALS: dict[str, tuple[Spoil, int, set[str]]] = {
    "no config.json": (remove("config.json"), 4, {"config-missing"}),
    "broken config.json": (write("config.json", b'{"a": '), 4, {"config-broken"}),
    "config.json is a list": (write("config.json", b"[]"), 4, {"config-broken"}),
    "config.json is an LFS pointer": (
        write("config.json", b"version https://git-lfs.github.com/spec/v1"),
        4,
        {"config-broken"},
    ),
    "unknown architecture": (
        config(architectures=["LamaForCausalLM"]),
        4,
        {"architecture-unknown"},
    ),
    "no architectures": (config(architectures=...), 4, {"architecture-missing"}),
    "empty architectures": (config(architectures=[]), 4, {"architecture-missing"}),
    "an encoder": (config(architectures=["BertForMaskedLM"]), 4, {"architecture-not-servable"}),
    "a draft head": (config(architectures=["InklingMTPModel"]), 4, {"architecture-not-servable"}),
    "a size that is missing": (config(hidden_size=...), 4, {"config-key-missing"}),
    "a size that is text": (config(hidden_size="256"), 4, {"config-value"}),
    "KV heads that do not divide": (config(num_key_value_heads=7), 4, {"config-value"}),
    "an unknown rotary type": (
        config(rope_scaling={"rope_type": "sideways", "factor": 2.0}),
        4,
        {"config-value"},
    ),
    "no weights": (remove("model.safetensors"), 4, {"weights-missing"}),
    "a truncated file": (cut, 4, {"weights-truncated"}),
    "an empty file": (write("model.safetensors", b""), 4, {"weights-empty"}),
    "an LFS pointer": (
        write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        4,
        {"weights-lfs-pointer"},
    ),
    "a corrupt header": (write("model.safetensors", b"\xff" * 64), 4, {"weights-corrupt"}),
    "a missing shard": (missing_shard, 4, {"weights-shard-missing"}),
    "a missing tensor": (drop_tensor, 4, {"tensor-missing"}),
    "a wrong shape": (reshape_tensor, 4, {"tensor-shape"}),
    "fewer layers than config.json says": (config(num_hidden_layers=3), 4, {"tensor-missing"}),
    "more layers than config.json says": (config(num_hidden_layers=1), 4, {"tensor-unexpected"}),
    "no tokenizer": (remove("tokenizer.json"), 4, {"tokenizer-missing"}),
    "a broken tokenizer": (write("tokenizer.json", b"{"), 4, {"tokenizer-broken"}),
    "a vocabulary beyond the embedding": (
        write("tokenizer.json", b'{"model": {"vocab": {"a": 512}}, "added_tokens": []}'),
        4,
        {"tokenizer-vocabulary"},
    ),
    "three ranks for 16 heads": (
        flags("-tp", "3", "--device", "4xH200"),
        4,
        {"tensor-parallel-size"},
    ),
    "a pipeline": (flags("-pp", "2", "--device", "2xH200"), 4, {"pipeline-parallel-size"}),
    "eight ranks without GPUs": (flags("-tp", "8"), 3, {"too-few-devices"}),
    "four ranks on two GPUs": (flags("-tp", "4", "--device", "2xH200"), 3, {"too-few-devices"}),
    "several ranks in one process": (
        flags("-tp", "2", "--distributed-executor-backend", "uni", "--device", "2xH200"),
        2,
        {"executor-backend"},
    ),
    "a context beyond the positions": (flags("--max-model-len", "2049"), 4, {"max-model-len"}),
    "an unknown quantization": (flags("-q", "int3"), 2, {"quantization-unknown"}),
    "a quantization that is not the checkpoint's": (
        flags("--quantization", "awq"),
        4,
        {"quantization-mismatch"},
    ),
    "FP8, for which there is no kernel": (
        config(quantization_config={"quant_method": "fp8"}),
        4,
        {"quantization-unsupported"},
    ),
    "FP8 on a GPU that no engine serves it on": (
        lambda model: [
            *config(quantization_config={"quant_method": "fp8"})(model),
            *("--device", "V100"),
        ],
        3,
        {"quantization-unsupported"},
    ),
    "bfloat16 on a V100": (
        flags("--dtype", "bfloat16", "--device", "V100"),
        3,
        {"dtype-unsupported"},
    ),
    "a block size that no kernel has": (flags("--block-size", "24"), 2, {"block-size"}),
    "an attention backend of another device": (
        flags("--attention-backend", "CPU_ATTN", *H200),
        3,
        {"attention-backend"},
    ),
    "an unknown attention backend": (
        flags("--attention-backend", "FLASHY"),
        2,
        {"attention-backend-unknown"},
    ),
    "a prompt that no step can hold": (
        flags("--no-enable-chunked-prefill", "--max-num-batched-tokens", "1024"),
        2,
        {"batched-tokens"},
    ),
    "more sequences than tokens": (
        flags("--max-num-batched-tokens", "64", "--max-num-seqs", "65"),
        2,
        {"batched-tokens"},
    ),
    "drafts without a draft head": (
        flags("--speculative-config", '{"method": "mtp"}'),
        4,
        {"speculative-method"},
    ),
    "tool choice without a parser": (flags("--enable-auto-tool-choice"), 4, {"tool-call-parser"}),
    "a template that is not there": (
        flags("--chat-template", "/no/such/file.jinja"),
        4,
        {"chat-template-file"},
    ),
    "a cache for less than one sequence": (
        flags("--device", "sm_90:0.25GiB", "--max-num-seqs", "8", "--max-num-batched-tokens", "8"),
        0,
        set(),
    ),
    "an unknown device": (flags("--device", "H900"), 2, {"device-unknown"}),
    "a share of memory above one": (flags("--gpu-memory-utilization", "1.5"), 2, {"invalid-value"}),
    "two things at once": (
        lambda model: [*remove("tokenizer.json")(model), "--max-model-len", "4096"],
        4,
        {"tokenizer-missing", "max-model-len"},
    ),
}
NEAR_MISSES: dict[str, Spoil] = {
    "as it is": flags(),
    "two ranks": flags("-tp", "2", "--device", "2xH200"),
    "all heads apart": flags("-tp", "16", "--device", "16xH200"),
    "the whole context": flags("--max-model-len", "2048"),
    "a V100, which gets float16": flags("--device", "V100"),
    "nested text_config": lambda model: (
        (model.path / "config.json").write_text(
            json.dumps(
                {
                    "architectures": model.config["architectures"],
                    "model_type": "outer",
                    "hidden_size": 1,
                    "text_config": {k: v for k, v in LLAMA.items() if k != "architectures"},
                }
            )
        )
        and []
    ),
    "an architecture from the command line": lambda model: [
        *config(architectures=...)(model),
        *("--hf-overrides", '{"architectures": ["LlamaForCausalLM"]}'),
    ],
    "dummy weights": lambda model: [*remove("model.safetensors")(model), "--load-format", "dummy"],
    "token ids only": lambda model: [*remove("tokenizer.json")(model), "--skip-tokenizer-init"],
    "a step of one token a sequence": flags(
        "--max-num-batched-tokens", "64", "--max-num-seqs", "64"
    ),
    "a template given as text": flags("--chat-template", "{{ messages[0] }}"),
    "flags with underscores": flags("--max_model_len", "1K", "--no-enable_prefix_caching"),
}
WARNINGS: dict[str, tuple[Spoil, set[str]]] = {
    "no chat template": (remove("tokenizer_config.json"), {"chat-template-missing"}),
    "float16 for a bfloat16 model": (flags("--dtype", "half", *H200), {"dtype-overflow"}),
    "a stray shard": (
        lambda model: (
            (
                write_index(model.path, dict.fromkeys(model.tensors, "model.safetensors"))
                or write_safetensors(model.path / "old.safetensors", {"x": ("F32", [1])})
            )
            and []
        ),
        {"weights-stray-shard"},
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_exactly_what_is_wrong(
    model: Model, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spoil, status, codes = REFUSALS[name]
    found = preflight(capsys, str(model.path), *spoil(model))
    assert (found[0], set(found[1])) == (status, codes)


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_passes_without_a_word(
    model: Model, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert preflight(capsys, str(model.path), *NEAR_MISSES[name](model)) == (0, [])


@pytest.mark.parametrize("name", WARNINGS)
def test_what_may_go_well_is_a_warning(
    model: Model, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spoil, codes = WARNINGS[name]
    status, found = preflight(capsys, str(model.path), *spoil(model))
    assert (status, set(found)) == (0, codes)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_of_the_suite_passes(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, codes = preflight(capsys, str(tiny_checkpoint(family)))
    assert status == 0
    assert set(codes) <= {"chat-template-missing"}


def test_the_embedded_model_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight(capsys) == (0, [])


def test_ray_is_refused_where_it_is_missing_and_else_not_even_imported(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four ranks on two GPUs pass then: the other two may be another node's."""
    ray = ["-tp", "4", "--device", "2xH200", "--distributed-executor-backend", "ray"]
    monkeypatch.setitem(sys.modules, "ray", None)  # how Python notes that there is no such module
    assert preflight(capsys, str(model.path), *ray) == (4, ["ray-unavailable"])
    monkeypatch.delitem(sys.modules, "ray")
    (model.path / "ray.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(model.path)
    assert preflight(capsys, str(model.path), *ray) == (0, [])


def test_weights_that_do_not_fit_name_the_ranks_that_would_do(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    """1.9 GiB of weights for a device of 1 GiB; the suggested size then passes."""
    model.set(hidden_size=4096, intermediate_size=8192, num_hidden_layers=6, vocab_size=1024)
    model.tensors = {
        n: ("BF16", list(s)) for n, s in expected_tensors(model.config, "LlamaForCausalLM").items()
    }
    model.write()
    small = ["--max-model-len", "64", "--max-num-batched-tokens", "64", "--max-num-seqs", "4"]
    assert main(["preflight", str(model.path), "--device", "sm_90:1GiB", *small]) == 3
    text = capsys.readouterr().err
    assert "error[memory-weights]" in text
    (ranks,) = re.findall(r"--tensor-parallel-size (\d+)", text)
    device = f"{ranks}xsm_90:1GiB"
    assert preflight(capsys, str(model.path), "-tp", ranks, "--device", device, *small)[0] == 0


def test_the_longest_sequence_that_fits_is_told_and_really_fits(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    model.set(max_position_embeddings=1_000_000)
    small = ["--max-num-batched-tokens", "64", "--max-num-seqs", "4", "--device", "sm_90:1GiB"]
    assert main(["preflight", str(model.path), *small]) == 4
    text = capsys.readouterr().err
    assert "error[memory-kv-cache]" in text
    (longest,) = re.findall(r"--max-model-len (\d+)", text)
    status, codes = preflight(capsys, str(model.path), "--max-model-len", longest, *small)
    assert (status, codes) == (0, [])
    longer = str(int(longest) + 4096)
    assert preflight(capsys, str(model.path), "--max-model-len", longer, *small)[0] == 4


def test_a_cache_limit_below_one_sequence_is_told_before_loading(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model.set(max_position_embeddings=200_000)
    assert preflight(capsys, str(model.path)) == (0, [])  # the default grows to hold one
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.05")
    assert main(["preflight", str(model.path)]) == 4
    text = capsys.readouterr().err
    assert "error[memory-kv-cache]" in text and "VLLM_CPU_KVCACHE_SPACE" in text
    (longest,) = re.findall(r"--max-model-len (\d+)", text)
    assert preflight(capsys, str(model.path), "--max-model-len", longest)[0] == 0


def test_a_taken_port_and_a_foreign_host_are_told(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert main(["serve", str(model.path), "--host", "127.0.0.1", "--port", port]) == 5
    assert f"error[port-taken]: port {port} is in use" in capsys.readouterr().err
    assert main(["serve", str(model.path), "--host", "203.0.113.7", "--port", "0"]) == 5
    assert "error[host-unusable]" in capsys.readouterr().err


def test_an_uncached_hub_id_offline_is_refused_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    typed = "thinkingmachines/Inkling-Small-NVFP4 --tensor-parallel-size 2"
    typed += " --tokenizer-mode inkling --trust-remote-code"
    assert preflight(capsys, *typed.split()) == (4, ["model-offline"])


def test_a_cached_hub_id_is_found_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    root = tmp_path / "models--somebody--Some-Model"
    snapshot = root / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    Model(snapshot)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123abcd")
    assert preflight(capsys, "somebody/Some-Model") == (0, [])
    monkeypatch.setenv("HF_HUB_CACHE", "/nowhere")
    assert preflight(capsys, "somebody/Some-Model") == (4, ["model-offline"])
    found = preflight(capsys, "somebody/Some-Model", "--download-dir", str(tmp_path))
    assert found == (0, [])


@pytest.mark.parametrize(
    ("typed", "code", "words"),
    [
        ("serve --dtype float8", "usage", "choose from"),
        ("serve --modle x", "unknown-option", "did you mean --model"),  # typos: ignore
        ("serve --port eight", "usage", "invalid int value"),
        ("preflight --hf-overrides [1]", "usage", "not a JSON object"),
        ("serve --max-model-len 8x", "usage", "give a number such as 8192, 8k or 8K"),
        ("serve --enable-lora", "unknown-option", "no option --enable-lora"),
        ("srve", "unknown-command", "did you mean serve"),
        ("serve a --model b", "model-twice", "name one"),
        ("serve --speculative-config {}x", "usage", "not a JSON object"),
        ('serve --speculative-config {"tokens":3}', "invalid-value", "num_speculative_tokens"),
        ("bench fast", "unknown-command", "throughput"),
    ],
)
def test_a_wrong_command_line_is_one_finding(
    typed: str, code: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error[{code}]: ") and words in told
    assert len(told.splitlines()) <= 5


def test_the_plan_tells_what_a_device_would_do(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preflight", str(model.path), "--device", "2xH200", "-tp", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["devices"] == ["NVIDIA H200"] * 2
    assert plan["dtype"] == "bfloat16" and plan["attention_backends"] == {"full": "TRITON_ATTN"}
    # K and V of 8 KV heads of 16 values over two ranks, two layers, two bytes
    assert plan["kv_bytes_per_token"] == 2 * 8 * 16 * 2 * 2 // 2
    matrices = sum(s[0] * s[1] for _, s in model.tensors.values() if len(s) == 2)
    vectors = sum(s[0] for _, s in model.tensors.values() if len(s) == 1)
    assert plan["weight_bytes"] == matrices * 2 // 2 + vectors * 2
    assert plan["memory_budget"] == int(141 * 2**30 * 0.9)
