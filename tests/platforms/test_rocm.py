# SPDX-License-Identifier: Apache-2.0
"""AMD GPUs, from topology files as the kernel writes them; the hook over its two tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm.errors import ExitCode, UnsupportedModelError
from vllm.models.registry import MODELS
from vllm.platforms import rocm
from vllm.platforms.rocm import RocmPlatform

GiB = 1 << 30


@pytest.fixture(autouse=True)
def two_mi300x(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of one processor (node 0) and two MI300X."""
    for node, version in enumerate((0, 90402, 90402)):
        bank = tmp_path / str(node) / "mem_banks" / "0"
        bank.mkdir(parents=True)
        text = f"cpu_cores_count 0\ngfx_target_version {version}\n"
        (tmp_path / str(node) / "properties").write_text(text)
        (bank / "properties").write_text(f"heap_type 1\nsize_in_bytes {192 * GiB}\n")
    monkeypatch.setattr(rocm, "_NODES", tmp_path)
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    rocm._topology.cache_clear()
    yield
    rocm._topology.cache_clear()


def test_gpus_are_read_from_the_topology_and_processors_are_not_gpus() -> None:
    devices = RocmPlatform.devices()
    assert [(d.index, d.name, d.capability) for d in devices] == [
        (0, "AMD gfx942", (9, 4)),
        (1, "AMD gfx942", (9, 4)),
    ]
    assert devices[0].memory_total == 192 * GiB


@pytest.mark.parametrize(("visible", "count"), [("1", 1), ("0,1", 2), ("", 0), ("0,5,1", 1)])
def test_hip_visible_devices_choose(
    visible: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", visible)
    assert RocmPlatform.device_count() == count


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_no_architecture_is_refused_today(architecture: str) -> None:
    RocmPlatform.verify_model_arch(architecture, num_devices=2)


def test_an_architecture_in_the_table_would_be_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(rocm._ROCM_UNSUPPORTED_MODELS, "SomeForCausalLM", "it needs a kernel")
    with pytest.raises(UnsupportedModelError) as caught:
        RocmPlatform.verify_model_arch("SomeForCausalLM")
    assert caught.value.findings[0].why == "it needs a kernel"
    assert caught.value.exit_code == ExitCode.HARDWARE
