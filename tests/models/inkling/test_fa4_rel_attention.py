# SPDX-License-Identifier: Apache-2.0
"""What FA4 has on which GPU: the check, the constants, the split counts, the constructor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vllm.platforms as platforms
from vllm.errors import UnsupportedModelError
from vllm.models.inkling.nvidia.attention import InklingAttention
from vllm.models.inkling.nvidia.ops import fa4_rel_attention as op
from vllm.platforms import Device, DeviceCapability, planned_platform
from vllm.platforms.cuda import _CAPABILITY_RESTRICTED_MODELS
from vllm.platforms.gpus import parse_device_spec

ALLOWED = ["7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "13.0"]
DENIED = ["12.0", "12.1"]
CMAKE = Path(__file__).parents[3] / "cmake" / "external_projects" / "tml_fa4.cmake"


@pytest.fixture(autouse=True)
def own_platform() -> Iterator[None]:
    """Each test may say which machine this is."""
    before = platforms._override
    yield
    platforms._override = before


def this_is(capability: str) -> None:
    digits = capability.replace(".", "")
    platforms.set_platform(planned_platform(parse_device_spec(f"sm_{digits}")))


@pytest.mark.parametrize("capability", ALLOWED)
def test_the_check_passes_where_no_kernel_is_missing(capability: str) -> None:
    this_is(capability)
    op.check_inkling_fa4_support()


@pytest.mark.parametrize("capability", DENIED)
def test_the_check_names_device_capability_and_kernel(capability: str) -> None:
    this_is(capability)
    with pytest.raises(ValueError, match="cannot run on SM") as error:
        op.check_inkling_fa4_support()
    assert isinstance(error.value, UnsupportedModelError)
    (finding,) = error.value.findings
    assert f"(compute capability {capability})" in finding.subject
    assert "no paged-KV forward on SM12x" in finding.why
    assert "--attention-backend TRITON_ATTN" in finding.fix


def test_the_users_portable_backend_passes_and_fa4_does_not() -> None:
    this_is("12.0")
    op.check_inkling_fa4_support("TRITON_ATTN")
    with pytest.raises(UnsupportedModelError):
        op.check_inkling_fa4_support("FLASH_ATTN")


def test_an_unknown_capability_and_a_failing_query_pass() -> None:
    platforms.set_platform(planned_platform((Device(0, "GPU", DeviceCapability(9, 0)),)))

    class Unknown(platforms.current_platform):  # type: ignore[misc, name-defined]
        @classmethod
        def devices(cls) -> tuple[Device, ...]:
            return (Device(0, "a GPU of unknown capability", None),)

    platforms.set_platform(Unknown)
    op.check_inkling_fa4_support()

    class Failing(Unknown):
        @classmethod
        def devices(cls) -> tuple[Device, ...]:
            return ()  # get_device_capability raises RuntimeError then

    platforms.set_platform(Failing)
    op.check_inkling_fa4_support()


def test_front_end_and_backstop_say_the_same() -> None:
    this_is("12.0")
    with pytest.raises(UnsupportedModelError) as backstop:
        op.check_inkling_fa4_support()
    with pytest.raises(UnsupportedModelError) as front_end:
        platforms.current_platform.verify_model_arch("InklingForConditionalGeneration")
    assert str(backstop.value) == str(front_end.value)


@pytest.mark.parametrize("arguments", [(None, None, None, None), (None, object(), 7, "x")])
def test_the_constructor_checks_before_it_touches_anything(arguments: tuple[Any, ...]) -> None:
    this_is("12.1")
    with pytest.raises(UnsupportedModelError, match="12.1"):
        InklingAttention(*arguments)
    this_is("9.0")
    with pytest.raises(AttributeError):
        InklingAttention(*arguments)  # nothing was checked wrongly, so nonsense is met first


def test_table_and_constants_agree() -> None:
    for architecture in (
        "InklingForConditionalGeneration",
        "InklingForCausalLM",
        "InklingMTPModel",
    ):
        assert _CAPABILITY_RESTRICTED_MODELS[architecture].denied_majors == op._NO_PAGED_KV_MAJORS
    assert frozenset({10, 11}) == op._SHEARED_BIAS_MAJORS == op._SPLIT_KV_MAJORS
    assert not op._SPLIT_KV_MAJORS & op._NO_PAGED_KV_MAJORS


def test_every_capability_of_the_table_is_compiled_ahead_of_time() -> None:
    """The portable path must exist wherever FA4 does not."""
    from vllm.layers.ops.chips import SHARED_MEMORY_BYTES

    majors = {int(name[3:-1]) for name in SHARED_MEMORY_BYTES if name.startswith("sm_")}
    assert majors >= op._NO_PAGED_KV_MAJORS | op._SHEARED_BIAS_MAJORS
    assert {8, 9} <= majors


def test_the_constants_name_the_pin_that_they_follow() -> None:
    source = Path(op.__file__).read_text()
    assert "cmake/external_projects/tml_fa4.cmake" in source
    assert "13374f0c855acc1add1bf30444bd67aebbc24a8e" in CMAKE.read_text()
    assigned = {
        target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert {"_NO_PAGED_KV_MAJORS", "_SHEARED_BIAS_MAJORS", "_SPLIT_KV_MAJORS"} <= assigned


# heads, KV heads, context: batch 1, 2, 4, 8, 16, 32 of one query, then one sequence of 4, 64,
# 512 and 8,192 queries (shared/inkling_num_splits.md).
SPLITS = """
64 8    8192  16  8  4  2  1  1  16   4  1  1
64 8   65536  16  8  4  2  1  1  16   4  1  1
64 8 1048576  16  8  4  2  1  1  16   4  1  1
32 4    8192  32 16  8  4  2  1  32   8  1  1
32 4   65536  32 16  8  4  2  1  32   8  1  1
32 4 1048576  32 16  8  4  2  1  32   8  1  1
16 2    8192  32 32 16  8  4  2  32  16  2  1
16 2   65536  64 32 16  8  4  2  64  16  2  1
16 2  131072 128 32 16  8  4  2 128  16  2  1
 8 1    8192  32 64 32 16  8  4  32  32  4  1
 8 1   65536  64 64 32 16  8  4  64  32  4  1
 8 1 1048576 128 64 32 16  8  4 128  32  4  1
32 8    8192  16  8  4  2  1  1  16  16  1  1
32 8 1048576  16  8  4  2  1  1  16  16  1  1
16 4   65536  32 16  8  4  2  1  32  32  2  1
 8 2    8192  32 32 16  8  4  2  32  32  4  1
 8 2   65536  64 32 16  8  4  2  64  64  4  1
 8 2  131072 128 32 16  8  4  2 128 128  4  1
 4 1    8192  32 64 32 16  8  4  32  32  8  1
 4 1   65536  64 64 32 16  8  4  64  64  8  1
 4 1 1048576 128 64 32 16  8  4 128 128  8  1
"""
STEPS = [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (1, 4), (1, 64), (1, 512), (1, 8192)]


@pytest.mark.parametrize("major", [10, 11])
@pytest.mark.parametrize("line", SPLITS.strip().splitlines())
def test_splits_on_blackwell_are_those_of_the_table(major: int, line: str) -> None:
    heads, kv_heads, length, *counts = map(int, line.split())
    capability = DeviceCapability(major, 0)
    got = [
        op.inkling_fa4_num_splits(capability, False, batch, queries, heads, kv_heads, length)
        for batch, queries in STEPS
    ]
    assert got == counts
    assert op.inkling_fa4_num_splits(capability, True, 1, 1, heads, kv_heads, length) == 1


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.9", "9.0", "12.0", "12.1", "13.0"])
def test_nothing_is_split_elsewhere(capability: str) -> None:
    major, minor = map(int, capability.split("."))
    found = DeviceCapability(major, minor)
    assert op.inkling_fa4_num_splits(found, False, 1, 1, 64, 8, 1048576) == 1
    assert op.inkling_fa4_num_splits(None, False, 1, 1, 64, 8, 1048576) == 1
