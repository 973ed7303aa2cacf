# SPDX-License-Identifier: Apache-2.0
"""Text that users write about devices: `--device` and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm.errors import ExitCode, UsageError
from vllm.platforms import planned_platform
from vllm.platforms.gpus import KNOWN_GPUS, Gpu, known_gpu, parse_device_spec
from vllm.platforms.interface import DeviceCapability
from vllm.platforms.visible import parse_visible_devices, select_ordinals, select_uuids

GiB = 1 << 30


@pytest.mark.parametrize(
    ("spec", "count", "capability", "gib"),
    [
        ("sm_120", 1, (12, 0), None),
        ("SM_90a", 1, (9, 0), None),
        ("sm121", 1, (12, 1), None),
        ("sm_120:96GiB", 1, (12, 0), 96),
        ("RTX PRO 6000", 1, (12, 0), 96),
        ("rtx-pro-6000", 1, (12, 0), 96),
        ("2xH200", 2, (9, 0), 141),
        ("8 x B200", 8, (10, 0), 180),
        ("H200:120GiB", 1, (9, 0), 120),
        ("GB10", 1, (12, 1), 128),
        ("cpu", 1, None, None),
        ("cpu:16GiB", 1, None, 16),
    ],
)
def test_a_device_spec_gives_that_many_devices(
    spec: str, count: int, capability: tuple[int, int] | None, gib: int | None
) -> None:
    devices = parse_device_spec(spec)
    assert [d.index for d in devices] == list(range(count))
    for device in devices:
        assert device.capability == capability
        assert device.memory_total == (None if gib is None else gib * GiB)
    assert planned_platform(devices).device_count() == count


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("H2OO", "H200"),
        ("RTX PRO 600", "RTX PRO 6000"),
        ("0xH200", "1 to 1024"),
        ("99999999xH200", "1 to 1024"),
        ("", ""),
    ],
)
def test_an_unknown_device_is_wrong_usage_and_names_what_is_near(spec: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_device_spec(spec)
    assert why in caught.value.findings[0].why
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("gpu", KNOWN_GPUS, ids=lambda gpu: gpu.name)
def test_every_known_gpu_is_found_by_its_own_name(gpu: Gpu) -> None:
    assert known_gpu(f"NVIDIA {gpu.name}") is gpu


def test_names_that_contain_another_are_told_apart() -> None:
    assert known_gpu("NVIDIA L4").name == "L4"  # type: ignore[union-attr]
    assert known_gpu("NVIDIA L40S").name == "L40S"  # type: ignore[union-attr]
    assert known_gpu("NVIDIA A100-SXM4-80GB").memory_gib == 80  # type: ignore[union-attr]
    assert known_gpu("NVIDIA H100 PCIe").bandwidth == 2000  # type: ignore[union-attr]
    assert known_gpu("Matrox G200") is None


def test_capabilities_compare_by_number() -> None:
    assert DeviceCapability(9, 0) < DeviceCapability(10, 0) < DeviceCapability(12, 1)
    assert DeviceCapability(12, 1).to_int() == 121
    assert str(DeviceCapability(8, 9)) == "8.9"


@given(st.text(alphabet=string.printable + "\u0663\u00e9", max_size=30))
@example("\u0663xH200")
@example("sm_\u0661\u0662\u0660")
@example("9" * 5000 + "xH200")
@example("cpu:" + "9" * 400 + "GiB")
@example("x" * 5000)
@example("(((((" * 1000)
def test_any_device_spec_is_devices_or_wrong_usage(spec: str) -> None:
    try:
        devices = parse_device_spec(spec)
    except UsageError as error:
        assert str(error).startswith("error[device-unknown]")
        return
    assert 1 <= len(devices) <= 1024


_ENTRY = st.one_of(
    st.integers(-3, 12).map(str),
    st.sampled_from(["GPU-1", "GPU-1a2b", "GPU-", "MIG-1", "", " ", "x", "1x", "+1", "\u0663"]),
    st.text(max_size=6),
)


@given(st.lists(_ENTRY, max_size=8).map(",".join))
@example("9" * 5000)
@example("-" * 1000)
@example("," * 1000)
def test_any_visible_devices_choose_distinct_devices_that_exist(value: str) -> None:
    uuids = [f"GPU-{i:x}a2b" for i in range(8)]
    wanted = parse_visible_devices(value)
    assert wanted is not None
    if wanted and isinstance(wanted[0], str):
        chosen = select_uuids([str(w) for w in wanted], uuids)
    else:
        chosen = select_ordinals([int(w) for w in wanted], len(uuids))
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(range(8))


@given(st.lists(st.integers(0, 7), unique=True, max_size=8))
def test_ordinals_that_exist_are_taken_in_their_order(ordinals: list[int]) -> None:
    wanted = parse_visible_devices(",".join(map(str, ordinals)))
    assert select_ordinals([int(w) for w in wanted or []], 8) == ordinals
