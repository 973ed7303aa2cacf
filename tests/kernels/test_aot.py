# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel compiles for every chip that is not refused, within its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.layers.ops.chips import SHARED_MEMORY_BYTES

ROOT = Path(__file__).parents[2]


def compile_for(*arguments: str) -> list[dict[str, object]]:
    """Records of `tests.kernels.aot`, in a process whose Triton does not interpret."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.aot", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    records: list[dict[str, object]] = json.loads(done.stdout)
    return records


def assert_within_shared_memory(records: list[dict[str, object]]) -> None:
    for record in records:
        limit = SHARED_MEMORY_BYTES[str(record["arch"])]
        assert int(str(record["shared"])) <= limit, f"{record} against a limit of {limit} bytes"


@pytest.mark.parametrize("arch", ["sm_86", "gfx942"])
def test_the_largest_of_each_kernel_fits_the_smallest_chips(arch: str) -> None:
    records = compile_for("--core", arch)
    assert len(records) == 15
    assert_within_shared_memory(records)


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("arch", SHARED_MEMORY_BYTES)
def test_every_configuration_fits_the_chip(arch: str) -> None:
    records = compile_for(arch)
    assert {record["arch"] for record in records} == {arch}
    assert_within_shared_memory(records)


def test_the_table_names_the_chips_that_are_supported() -> None:
    cuda = {80, 86, 89, 90, 100, 103, 110, 120, 121}
    names = {f"sm_{capability}" for capability in cuda} | {"gfx942", "gfx950"}
    assert set(SHARED_MEMORY_BYTES) == names
