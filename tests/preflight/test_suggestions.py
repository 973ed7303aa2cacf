# SPDX-License-Identifier: Apache-2.0
"""What a refusal suggests must work: suggested lengths and sizes, taken, are refused no more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.preflight.checkpoints import Model
from vllm import preflight
from vllm.config.kv_plan import plan_kv_cache
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.gpus import parse_device_spec
from vllm.preflight.report import PreflightReport

MIB = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 MiB of weights in four layers, and of a million positions."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 8192}
    directory = tmp_path_factory.mktemp("model")
    return Model(directory, **sizes, num_hidden_layers=4, max_position_embeddings=1_000_000).path


def report(path: Path, device: str, **values: object) -> PreflightReport:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 256, **values}
    arguments = EngineArgs(str(path), **settings)
    config = arguments.create_engine_config(parse_device_spec(device), defer_errors=True)
    return preflight.run(config)


def codes(found: PreflightReport) -> list[str]:
    return [d.code for d in found.findings]


def suggested(found: PreflightReport, flag: str) -> int | None:
    numbers = re.findall(rf"{flag} (\d+)", found.findings[0].fix)
    return int(numbers[0]) if numbers else None


fuzzed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@fuzzed
@given(gib=st.floats(0.1, 4.0), length=st.integers(2_000, 1_000_000), tp=st.sampled_from([1, 2, 4]))
def test_a_suggested_length_fits_in_preflight_and_in_the_engine(
    path: Path, gib: float, length: int, tp: int
) -> None:
    device = f"{tp}xsm_90:{gib:.4f}GiB"
    found = report(path, device, max_model_len=length, tensor_parallel_size=tp)
    if "memory-kv-cache" not in codes(found):
        return
    shorter = suggested(found, "--max-model-len")
    if shorter is None:  # nothing fits
        return
    assert shorter < length
    again = report(path, device, max_model_len=shorter, tensor_parallel_size=tp)
    assert codes(again) == []
    assert again.plan is not None and again.plan.kv_bytes is not None
    arguments = EngineArgs(
        str(path),
        max_model_len=shorter,
        tensor_parallel_size=tp,
        max_num_seqs=4,
        max_num_batched_tokens=256,
    )
    config = arguments.create_engine_config(parse_device_spec(device))
    assert plan_kv_cache(config, again.plan.kv_bytes).num_blocks[0] * 16 > shorter


@fuzzed
@given(mib=st.integers(8, 120), length=st.integers(64, 100_000))
def test_a_suggested_number_of_ranks_fits(path: Path, mib: int, length: int) -> None:
    device = f"sm_90:{mib / 1024:.4f}GiB"
    found = report(path, device, max_model_len=length)
    if "memory-weights" not in codes(found):
        return
    ranks = suggested(found, "--tensor-parallel-size")
    if ranks is None:
        return
    shape = {"max_model_len": length, "tensor_parallel_size": ranks}
    assert report(path, f"{ranks}x{device}", **shape).exit_code == 0
    if ranks > 2:
        fewer = {**shape, "tensor_parallel_size": ranks // 2}
        assert codes(report(path, f"{ranks // 2}x{device}", **fewer)) != []


def test_no_refusal_where_the_engine_would_run(path: Path) -> None:
    """From far too little memory to plenty: refused below, warned about between, silent above."""
    seen = []
    for mib in range(40, 400, 4):
        found = report(path, f"sm_90:{mib / 1024:.4f}GiB", max_model_len=4096)
        severities = {d.severity for d in found.findings}
        state = 0 if "error" in severities else 1 if severities else 2
        seen.append(state)
    assert seen == sorted(seen) and set(seen) == {0, 1, 2}


def test_an_explicit_number_of_blocks_need_not_hold_a_whole_sequence(path: Path) -> None:
    found = report(path, "sm_90:0.25GiB", num_gpu_blocks_override=64)
    assert found.exit_code == 0 and found.plan is not None
    assert found.plan.kv_tokens == 63 * 16
    assert codes(report(path, "sm_90:0.25GiB")) == ["memory-kv-cache"]
