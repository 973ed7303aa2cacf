# SPDX-License-Identifier: Apache-2.0
"""Which Ray is joined or started, and which rank gets which device."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny_models import tiny_checkpoint
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ResourceError
from vllm.worker import ray_executor
from vllm.worker.executor import Executor
from vllm.worker.ray_executor import Place, RayExecutor, rank_order


def places(*rows: tuple[str, str]) -> list[Place]:
    """Actors by node and GPU; a node's address is its name's."""
    return [Place(node, f"10.0.0.{node}", 1, 1, (gpu,) if gpu else ()) for node, gpu in rows]


ORDERS = {
    "this node first, then by address": ([("3", ""), ("2", ""), ("3", ""), ("1", "")], "", "0231"),
    "GPUs by number, not by text": ([("1", "10"), ("1", "9"), ("1", "2")], "", "210"),
    "as this process counts them": ([("1", "2"), ("1", "0"), ("1", "5")], "5, 2,0", "201"),
    "by unique name": ([("1", "GPU-a"), ("1", "GPU-b")], "GPU-b,GPU-a", "10"),
    "other nodes behind": ([("2", "0"), ("1", "1"), ("2", "1"), ("1", "0")], "1,0", "1320"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_ranks_are_in_the_order_of_nodes_and_devices(name: str) -> None:
    rows, visible, expected = ORDERS[name]
    here = "3" if rows[0][0] == "3" else "1"
    environ = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    assert rank_order(places(*rows), here, environ) == [int(c) for c in expected]


def config(ranks: int) -> Any:
    return EngineArgs(
        model=str(tiny_checkpoint("llama")),
        tensor_parallel_size=ranks,
        distributed_executor_backend="ray",
        skip_tokenizer_init=True,
    ).create_engine_config()


def test_an_address_without_a_cluster_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        silent = f"127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_executor._cluster_address() == ""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(silent + "\n")
    assert ray_executor._cluster_address() == silent
    with pytest.raises(ResourceError, match=r"error\[ray-cluster\].*\n.*refused.*\n.*left behind"):
        ray_executor._check_answer(silent)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert ray_executor._cluster_address() == ""
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(ResourceError, match="not a client of Ray"):
        ray_executor._check_answer(ray_executor._cluster_address())


def test_a_cluster_that_is_too_small_is_told_with_both_numbers(joined: str) -> None:
    import ray

    with pytest.raises(ResourceError, match="4 ranks .* the Ray cluster has 2 on 2 nodes"):
        Executor.create(config(4))
    assert not ray.is_initialized()


def test_the_cluster_is_as_before_when_an_engine_has_left(joined: str) -> None:
    import ray

    executor = Executor.create(config(2))
    assert isinstance(executor, RayExecutor)
    assert len({place.node_id for place in executor._places}) == 2
    executor.shutdown()
    executor.shutdown()
    assert not ray.is_initialized()
    ray.init(address=joined, logging_level="ERROR")
    try:
        tables = ray.util.placement_group_table().values()
        assert {table["state"] for table in tables} == {"REMOVED"}
        before = signal.getsignal(signal.SIGTERM)
        again = Executor.create(config(1))  # with the Ray that its process is in already
        assert signal.getsignal(signal.SIGTERM) is before
        again.shutdown()
        assert ray.is_initialized()
    finally:
        ray.shutdown()


ALONE = """
import signal, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    assert "ray" not in sys.modules
    llm = LLM(sys.argv[1], distributed_executor_backend="ray", skip_tokenizer_init=True,
              dtype="float32", num_gpu_blocks_override=64)
    import ray
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, detokenize=False)
    (result,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 4
    print(ray.cluster_resources()["CPU"], len(ray.nodes()))
    llm.shutdown()
    print(ray.is_initialized())
"""


def test_without_a_cluster_a_small_ray_is_started_and_ended(
    ray_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(ray_directory / "alone"))
    script = tmp_path / "alone.py"
    script.write_text(textwrap.dedent(ALONE))
    command = [sys.executable, str(script), str(tiny_checkpoint("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-2:] == ["1.0 1", "False"], done.stderr
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(ray_directory / "alone") not in left.stdout
