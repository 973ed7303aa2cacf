# SPDX-License-Identifier: Apache-2.0
"""nvidia-ml-py over machines that are not here: what each visible device is said to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.nvml_stub import mig_uuid, run_python, uuid_of

MiB = 1 << 20
_DEVICES = """
import json, sys
from vllm.platforms.cuda import CudaPlatform
print(json.dumps({
    "devices": [{**vars(d), "capability": d.capability} for d in CudaPlatform.devices()],
    "problem": CudaPlatform.problem(), "torch": "torch" in sys.modules}))
"""
_DETECTED = """
import vllm.platforms as platforms
print(platforms.current_platform.display_name)
"""


def ask(machine: str, **variables: str) -> dict[str, Any]:
    return json.loads(run_python(_DEVICES, machine, **variables))


def places(machine: str, visible: str | None) -> list[int]:
    """Which of the machine's devices are visible, in order, told by their UUIDs."""
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return [int(d["uuid"][4], 16) for d in ask(machine, **variables)["devices"]]


@pytest.mark.parametrize(
    ("machine", "capability", "name", "total_mib"),
    [
        ("V100", [7, 0], "Tesla V100-SXM2-32GB", 32768),
        ("T4", [7, 5], "Tesla T4", 15360),
        ("A100", [8, 0], "NVIDIA A100-SXM4-80GB", 81920),
        ("H200", [9, 0], "NVIDIA H200", 143771),
        ("B200", [10, 0], "NVIDIA B200", 183359),
        ("Thor", [11, 0], "NVIDIA Thor", 125772),
        ("RTX 5090", [12, 0], "NVIDIA GeForce RTX 5090", 32607),
    ],
)
def test_a_device_is_told_with_name_capability_and_memory(
    machine: str, capability: list[int], name: str, total_mib: int
) -> None:
    answer = ask(machine)
    (device,) = answer["devices"]
    assert device["capability"] == capability
    assert device["name"] == name
    assert device["memory_total"] == total_mib * MiB
    assert device["memory_free"] == (total_mib - 600) * MiB
    assert device["uuid"] == uuid_of(0)
    assert device["pci_bus_id"] == "00000000:01:00.0"
    assert not device["is_unified"]
    assert answer["problem"] is None
    assert not answer["torch"]


def test_unified_memory_without_a_figure_is_the_host_s() -> None:
    (device,) = ask("GB10")["devices"]
    host = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert device["is_unified"]
    assert device["capability"] == [12, 1]
    assert 0 < device["memory_free"] <= device["memory_total"] <= host


def test_a_capability_that_cannot_be_queried_is_unknown() -> None:
    (device,) = ask("no capability")["devices"]
    assert device["capability"] is None


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("6,7", [6, 7]),
        ("7,6", [7, 6]),
        (" 6 , 7 ", [6, 7]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("1,99,0", [1]),
        ("8", []),
        ("0,x,1", [0]),
        ("x,0", []),
        ("0,0", []),
        ("2,", [2]),
        (f"{uuid_of(6)},{uuid_of(7)}", [6, 7]),
        ("GPU-6", [6]),
        ("GPU-7,GPU-0", [7, 0]),
        ("GPU-", []),
        ("GPU-1,GPU-f", [1]),
        ("GPU-1,GPU-1a2b", []),
        ("GPU-1,2", [1]),
        ("2,GPU-1", [2]),
        ("MIG-0", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    visible: str | None, expected: list[int]
) -> None:
    assert places("6x H100 + 2x RTX PRO 6000", visible) == expected


@pytest.mark.parametrize(
    ("visible", "total_mib"),
    [
        (None, [40192]),
        ("0", [40192]),
        (mig_uuid(1), [20096]),
        (f"{mig_uuid(2)},{mig_uuid(0)}", [9856, 40192]),
        ("MIG-f", []),
    ],
)
def test_a_mig_instance_has_its_slice_of_memory_and_its_parent_s_capability(
    visible: str | None, total_mib: list[int]
) -> None:
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    devices = ask("A100 with MIG", **variables)["devices"]
    assert [d["memory_total"] for d in devices] == [m * MiB for m in total_mib]
    for device in devices:
        assert device["capability"] == [8, 0]
        assert device["uuid"].startswith("MIG-")
        assert device["pci_bus_id"] == "00000000:01:00.0"


def test_mig_without_an_instance_leaves_nothing_visible() -> None:
    assert ask("A100 with MIG and no instance")["devices"] == []


@pytest.mark.parametrize(
    ("machine", "problem"),
    [
        (
            "driver mismatch",
            "NVML: the driver in the kernel and the driver's library have different versions",
        ),
        ("driver not loaded", "NVML: Driver Not Loaded"),
    ],
)
def test_a_broken_driver_is_a_reason_and_no_device(machine: str, problem: str) -> None:
    answer = ask(machine)
    assert answer["devices"] == []
    assert answer["problem"] == problem


@pytest.mark.parametrize(
    ("machine", "variables", "expected"),
    [
        ("2x RTX PRO 6000", {}, "CUDA"),
        ("2x RTX PRO 6000", {"CUDA_VISIBLE_DEVICES": ""}, "CUDA"),
        ("2x RTX PRO 6000", {"VLLM_TARGET_DEVICE": "cpu"}, "CPU"),
        ("driver mismatch", {}, "CUDA"),
        ("no device", {}, "CPU"),
    ],
)
def test_the_platform_is_told_by_the_driver(
    machine: str, variables: dict[str, str], expected: str
) -> None:
    assert run_python(_DETECTED, machine, **variables) == expected


def test_nvml_is_asked_once_and_shut_down_again(tmp_path: Path) -> None:
    log = tmp_path / "shutdown"
    ask("2x H200", VLLM_NVML_STUB_SHUTDOWN_FILE=str(log))
    assert log.read_text() == "shutdown\n"
