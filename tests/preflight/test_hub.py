# SPDX-License-Identifier: Apache-2.0
"""Hub ids against a hub on localhost: refusals by their reason, and no weight byte too early."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.tiny_models import tiny_checkpoint
from tests.preflight.hub_server import MODEL, Hub, running_hub
from vllm.config.hub import cached_snapshot

ROOT = Path(__file__).parents[2]
WEIGHTS = "model.safetensors"
MAIN = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def run(hub_url: str, cache: Path, *arguments: str, code: str = MAIN) -> tuple[int, str]:
    """Exit status and standard error of a command that asks this hub."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**environment, "HF_ENDPOINT": hub_url, "HF_HUB_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


def weights_fetched(hub: Hub) -> bool:
    return any(name.endswith(".safetensors") for name in hub.fetched)


@pytest.mark.parametrize(
    ("refusal", "code", "words"),
    [
        ("missing", "model-not-found", "correct the id"),
        ("gated", "model-gated", "hf auth login"),
        ("revision", "model-not-found", "no revision 'v2'"),
        ("failing", "hub-unreachable", "500"),
        ("a web page", "hub-unreachable", "HF_ENDPOINT"),
    ],
)
def test_a_hub_that_refuses_is_told_by_its_reason(
    cache: Path, refusal: str, code: str, words: str
) -> None:
    with running_hub(None, refusal) as hub:
        status, told = run(hub.url, cache, "preflight", MODEL, "--revision", "v2")
    assert status == 4
    assert f"error[{code}]: " in told and words in told
    assert len(told.splitlines()) <= 5


def test_a_hub_that_does_not_answer_is_unreachable(cache: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        status, told = run(url, cache, "preflight", MODEL)
    assert status == 4 and "error[hub-unreachable]" in told and "refused" in told


@pytest.mark.parametrize("name", ["a--b/c", "a/..b", "a/b-", "a/b.git", "a b", "x" * 97])
def test_what_no_hub_takes_as_an_id_is_not_asked_for(cache: Path, name: str) -> None:
    with running_hub(None, "missing") as hub:
        status, told = run(hub.url, cache, "preflight", name)
        assert hub.fetched == []
    assert status == 4 and "error[model-missing]" in told


def test_preflight_looks_ahead_without_the_weights(cache: Path) -> None:
    with running_hub(tiny_checkpoint("llama")) as hub:
        status, told = run(hub.url, cache, "preflight", MODEL, "--port", "0")
        assert not weights_fetched(hub) and "config.json" in hub.fetched
    assert status == 0
    assert "info[weights-not-cached]" in told


def test_nothing_is_downloaded_for_a_run_that_cannot_be(cache: Path) -> None:
    with running_hub(tiny_checkpoint("llama")) as hub, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        flags = ["--host", "127.0.0.1", "--port", port, "--max-model-len", "1M"]
        status, told = run(hub.url, cache, "serve", MODEL, *flags)
        assert not weights_fetched(hub)
    assert status == 4
    assert "error[max-model-len]" in told and "error[port-taken]" in told


def test_weights_larger_than_the_disk_are_not_begun(cache: Path) -> None:
    sizes = {WEIGHTS: 1 << 60}
    with running_hub(tiny_checkpoint("llama"), sizes=sizes) as hub:
        status, told = run(hub.url, cache, "serve", MODEL, "--port", "0")
        assert not weights_fetched(hub)
    assert status == 5
    assert "error[disk-full]: the weights of somebody/Some-Model take 1073741824.0 GiB" in told


PROBE = """
import sys
from vllm.engine.arg_utils import EngineArgs
from vllm import preflight
report = preflight.run(EngineArgs(sys.argv[1]).create_engine_config(), download=True)
print(report.findings, file=sys.stderr)
"""


def test_a_run_that_can_be_downloads_them_and_checks_the_files(cache: Path) -> None:
    with running_hub(tiny_checkpoint("llama")) as hub:
        assert run(hub.url, cache, MODEL, code=PROBE)[0] == 0
        assert hub.fetched.count(WEIGHTS) == 1
        hub.fetched.clear()
        assert run(hub.url, cache, MODEL, code=PROBE)[0] == 0
        assert hub.fetched == []  # the cache answers
    snapshot = cached_snapshot(MODEL, None, cache)
    assert snapshot is not None
    assert (snapshot / WEIGHTS).stat().st_size == (
        tiny_checkpoint("llama") / WEIGHTS
    ).stat().st_size


def test_shards_that_a_broken_download_left_out_are_fetched(cache: Path) -> None:
    with running_hub(tiny_checkpoint("llama")) as hub:
        run(hub.url, cache, MODEL, code=PROBE)
        snapshot = cached_snapshot(MODEL, None, cache)
        assert snapshot is not None
        index = {"weight_map": {"model.norm.weight": WEIGHTS, "x": "model-2.safetensors"}}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
        hub.fetched.clear()
        status, told = run(hub.url, cache, MODEL, code=PROBE)
        assert hub.fetched  # it asked; this hub has no second shard
    assert status == 0 and "weights-shard-missing" in told


def test_a_cache_that_cannot_be_written_is_told(cache: Path) -> None:
    cache.write_text("a file where a directory is wanted")
    with running_hub(tiny_checkpoint("llama")) as hub:
        status, told = run(hub.url, cache, "preflight", MODEL)
    assert status == 5 and "error[cache-unwritable]" in told and str(cache) in told
