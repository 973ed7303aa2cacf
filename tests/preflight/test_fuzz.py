# SPDX-License-Identifier: Apache-2.0
"""Files and command lines that nobody meant: a finding or a plan, never a traceback or a hang."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.tiny_models import tiny_checkpoint
from tests.preflight.checkpoints import gguf_file
from vllm.config.fields import flag_of
from vllm.config.frontend import FrontendConfig
from vllm.engine.arg_utils import ENGINE_CONFIGS, config_fields
from vllm.entrypoints.cli.main import main

LONGEST_S = 5.0
MAX_LINES = 5
FAMILIES = ("llama", "mistral", "qwen3_moe", "mixtral", "inkling")
# Keys that some family or version has and the tiny checkpoints do not.
MORE_KEYS = (
    "text_config", "quantization_config", "compression_config", "rope_scaling", "sliding_window",
    "layer_types", "mlp_only_layers", "num_experts", "num_local_experts", "max_window_layers",
    "torch_dtype", "mtp_config", "attention_bias", "decoder_sparse_step", "num_mtp_layers",
)  # fmt: skip
fuzzed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

numbers = st.one_of(
    st.integers(-3, 20),
    st.sampled_from([2**31, 2**40, 10**5, 10**30, 0.5, -1.5, 1e300]),
)
words = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["llama3", "yarn", "float16", "full_attention", "fp8", "\n" * 9, "x" * 9999]),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, words)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from([*MORE_KEYS, "rope_type", "factor"]), inner, max_size=3),
    ),
    max_leaves=6,
)


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and findings of a command, which must end soon and in the documented way."""
    out, err = io.StringIO(), io.StringIO()
    started = time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(arguments))
    assert time.monotonic() - started < LONGEST_S
    assert status in (0, 2, 3, 4, 5)
    told = err.getvalue()
    heads = [li for li in told.splitlines() if li.startswith(("error[", "warning[", "info["))]
    assert len(told.splitlines()) <= MAX_LINES * len(heads)
    assert told.isascii() and all(len(li) < 500 for li in told.splitlines())
    assert (status == 0) == (not any(h.startswith("error[") for h in heads))
    return status, told


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


@functools.cache
def original(family: str, name: str) -> Any:
    return json.loads((tiny_checkpoint(family) / name).read_text())


def copy_of(family: str, target: Path) -> Path:
    """The tiny checkpoint of a family in a directory that may be spoilt."""
    path = target / family
    if not path.exists():
        shutil.copytree(tiny_checkpoint(family), path)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text(json.dumps(original(family, name)))
    return path


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value could be replaced."""
    items = content.items() if isinstance(content, dict) else enumerate(content[:4])
    for key, value in items:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


@functools.cache
def places_in(family: str, name: str) -> list[tuple[Any, ...]]:
    content = original(family, name)
    if name == "tokenizer.json":
        content["model"] = {"type": "BPE", "vocab": {}, "merges": []}
    extra = [(k,) for k in MORE_KEYS if name == "config.json"]
    if "text_config" in content:
        extra += [("text_config", k) for k in (*MORE_KEYS, "local_layer_ids", "dense_mlp_idx")]
    return [*places(content), *extra]


def spoil(data: st.DataObject, family: str, name: str) -> str:
    """The file's text with one to three values replaced or removed."""
    content = json.loads(json.dumps(original(family, name)))
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, last = data.draw(st.sampled_from(places_in(family, name)))
        holder = content
        with contextlib.suppress(KeyError, TypeError, IndexError):  # an earlier change took it
            for key in parents:
                holder = holder[key]
            if data.draw(st.integers(0, 9)) == 0:
                del holder[last]
            else:
                holder[last] = data.draw(values)
    return json.dumps(content)


@pytest.mark.parametrize("family", FAMILIES)
@fuzzed
@given(data=st.data())
def test_config_json(tmp_path: Path, family: str, data: st.DataObject) -> None:
    path = copy_of(family, tmp_path)
    (path / "config.json").write_text(spoil(data, family, "config.json"))
    flags = ["--speculative-config", "{}"] if family == "inkling" else []
    run("preflight", str(path), "--port", "0", *flags)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@fuzzed
@given(data=st.data())
def test_json_that_is_cut_or_hit(tmp_path: Path, name: str, data: st.DataObject) -> None:
    path = copy_of("llama", tmp_path)
    content = bytearray((path / name).read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (path / name).write_bytes(content[: data.draw(st.integers(0, len(content)))])
    run("preflight", str(path), "--port", "0")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@fuzzed
@given(data=st.data())
def test_tokenizer_files(tmp_path: Path, name: str, data: st.DataObject) -> None:
    path = copy_of("llama", tmp_path)
    (path / name).write_text(spoil(data, "llama", name))
    run("preflight", str(path), "--port", "0")


@fuzzed
@given(
    index=st.one_of(
        values,
        st.builds(
            lambda m: {"weight_map": m},
            st.dictionaries(
                st.sampled_from(["model.norm.weight", "lm_head.weight", "", "x\ny"]),
                st.one_of(values, st.sampled_from(["model.safetensors", "../x", "a/b", "\0"])),
            ),
        ),
    )
)
def test_index_files(tmp_path: Path, index: Any) -> None:
    path = copy_of("llama", tmp_path)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    run("preflight", str(path), "--port", "0")


@functools.cache
def small_gguf() -> bytes:
    """A whole GGUF file, header and data, with a vocabulary."""
    with tempfile.TemporaryDirectory() as directory:
        return gguf_file(Path(directory) / "m.gguf").read_bytes()


def test_the_gguf_file_that_is_spoilt_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(small_gguf())
    assert run("preflight", str(file), "--port", "0") == (0, "")


@settings(fuzzed, max_examples=300)
@given(data=st.data())
def test_gguf_headers(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(small_gguf())
    header = content.index(b"output_norm.weight") + 64
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, header))
        width = data.draw(st.sampled_from([1, 4, 8]))
        number = data.draw(st.sampled_from([0, 1, 2, 7, 255, 2**20, 2**31, 2**32 - 1]))
        content[position : position + width] = number.to_bytes(8, "little")[:width]
    end = data.draw(st.sampled_from([len(content), len(content) - 1, header, header // 2, 4, 0]))
    file = tmp_path / "m.gguf"
    file.write_bytes(content[:end])
    run("preflight", str(file), "--port", "0")


FLAGS = [flag_of(f) for cls in (*ENGINE_CONFIGS, FrontendConfig) for f in config_fields(cls)]
FLAGS += ["--speculative-config", "--device", "-tp", "-pp", "-q", "--json", "--nonsense", "--"]
TYPED = ["0", "1", "2", "3", "-1", "1e9", "8K", "9" * 4400, "nan", "inf", "{}", "[]", "{", "true"]
TYPED += ["cpu", "2xH200", "sm_120:96GiB", "sm_90", "half", "mtp", "dummy", "\u00e9", "", "a b"]
# Names of real places that a random value could make the command fetch from or write to.
NEVER = {"--download-dir", "--model", "--tokenizer", "--host"}


@settings(fuzzed, max_examples=300)
@given(
    typed=st.lists(
        st.tuples(
            st.sampled_from([f for f in FLAGS if f not in NEVER]),
            st.one_of(st.sampled_from(TYPED), st.text(max_size=6).filter(lambda t: "-h" not in t)),
        ),
        max_size=4,
    ),
    seed=st.integers(0, 3),
)
def test_command_lines(typed: list[tuple[str, str]], seed: int) -> None:
    arguments = [part for pair in typed for part in pair]
    if seed == 0:
        random.Random(len(arguments)).shuffle(arguments)
    command = ["serve", "preflight"][seed == 1]
    if command == "serve":
        # A last word that always refuses, so that no server starts.
        arguments += ["--max-model-len", "1M"]
    run(command, str(tiny_checkpoint("llama")), *arguments)
