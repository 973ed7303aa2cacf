# SPDX-License-Identifier: Apache-2.0
"""Which Ray is joined or started, and which rank gets which device."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny_models import tiny_checkpoint
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError, ResourceError
from vllm.worker import ray_executor
from vllm.worker.executor import Executor
from vllm.worker.ray_executor import Place, RayExecutor, rank_order


def places(*rows: tuple[str, str]) -> list[Place]:
    """Actors by node and GPU; a node's address is its name's."""
    return [Place(node, f"10.0.0.{node}", 1, 1, (gpu,) if gpu else (), True) for node, gpu in rows]


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


def config(ranks: int, model: Path | None = None) -> Any:
    return EngineArgs(
        model=str(model or tiny_checkpoint("llama")),
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


def test_nodes_without_the_model_s_files_are_named(joined: str, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model")
    built = config(2, model)
    shutil.rmtree(model)
    with pytest.raises(
        ConfigError, match=r"error\[model-missing\]: .*/model does not exist on [\d.]+"
    ):
        Executor.create(built)


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


def run_script(directory: Path, text: str, *arguments: str) -> Any:
    """What a program of its own prints last, as JSON."""
    script = directory / "script.py"
    script.write_text(text)
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


GPUS = """
import json, os
from vllm.worker import ray_executor as r

if __name__ == "__main__":
    r._connect("GPU", 2)
    group = r._reserve("GPU", 2)
    actors = [r._start_actor(group, bundle, "GPU", b"key") for bundle in (0, 1)]
    places = r._answers([actor.place.remote("") for actor in actors])
    order = r.rank_order(places, r._node_id(), os.environ)
    import ray
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    look = lambda _: [os.environ.get(name) for name in names]
    seen = [ray.get(actors[i].__ray_call__.remote(look)) for i in order]
    print(json.dumps([[places[i].devices for i in order], *seen]))
    ray.shutdown()
"""


def test_on_one_node_ranks_get_the_gpus_that_the_front_end_names_in_its_order(
    ray_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray does not look whether GPUs that it is told of are there, so none is needed."""
    monkeypatch.setenv("RAY_TMPDIR", str(ray_directory / "gpus"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,7")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    first, *seen = run_script(tmp_path, GPUS)
    assert first == [["5"], ["3"]]
    assert seen == [["5", "PCI_BUS_ID"], ["3", "PCI_BUS_ID"]]


ALONE = """
import json, signal, sys
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
    seen = [ray.cluster_resources()["CPU"], len(ray.nodes())]
    llm.shutdown()
    print(json.dumps([*seen, ray.is_initialized()]))
"""


def test_without_a_cluster_a_small_ray_is_started_and_ended(
    ray_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(ray_directory / "alone"))
    assert run_script(tmp_path, ALONE, str(tiny_checkpoint("llama"))) == [1.0, 1, False]
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(ray_directory / "alone") not in left.stdout
