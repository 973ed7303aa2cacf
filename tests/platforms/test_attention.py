# SPDX-License-Identifier: Apache-2.0
"""The choice of an attention backend, as a function of facts that are passed in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from vllm.errors import ExitCode, UnsupportedHardwareError, UsageError
from vllm.platforms.attention import (
    BACKENDS,
    AttentionBackend,
    AttentionNeeds,
    select_attention_backend,
)
from vllm.platforms.gpus import parse_device_spec

PLAIN = AttentionNeeds(frozenset({128}), "bfloat16")
RELATIVE = AttentionNeeds(frozenset({128}), "bfloat16", relative_bias=True)


@pytest.fixture
def fa4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 as a package that can be found; importing it would fail."""
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    for directory in (package.parent, package):
        (directory / "__init__.py").write_text("raise RuntimeError('selection imports nothing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)


def choose(spec: str, needs: AttentionNeeds = PLAIN, requested: str | None = None) -> str:
    kind = "cpu" if spec == "cpu" else "cuda"
    return select_attention_backend(kind, parse_device_spec(spec), needs, requested).backend.name


@pytest.mark.usefixtures("fa4")
@pytest.mark.parametrize(
    ("spec", "plain"),
    [
        ("sm_75", "TRITON_ATTN"),
        ("sm_80", "TRITON_ATTN"),
        ("sm_89", "TRITON_ATTN"),
        ("sm_90", "FLASH_ATTN"),
        ("sm_100", "FLASH_ATTN"),
        ("sm_103", "FLASH_ATTN"),
        ("sm_110", "FLASH_ATTN"),
        ("sm_120", "TRITON_ATTN"),
        ("sm_121", "TRITON_ATTN"),
        ("sm_130", "TRITON_ATTN"),
        ("cpu", "CPU_ATTN"),
    ],
)
def test_fa4_is_taken_where_it_has_kernels_and_nowhere_else(spec: str, plain: str) -> None:
    assert choose(spec) == plain


@pytest.mark.usefixtures("fa4")
@pytest.mark.parametrize(
    "needs",
    [
        AttentionNeeds(frozenset({128, 160}), "bfloat16"),
        AttentionNeeds(frozenset({80}), "bfloat16"),
        AttentionNeeds(frozenset({128}), "float32"),
    ],
    ids=["wide", "odd", "float32"],
)
def test_a_shape_that_fa4_has_no_kernel_for_goes_to_triton(needs: AttentionNeeds) -> None:
    assert choose("H200", needs) == "TRITON_ATTN"


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="flash-attn-4 is installed here"
)
def test_without_the_package_the_reason_is_told() -> None:
    chosen = select_attention_backend("cuda", parse_device_spec("H200"), PLAIN)
    assert chosen.backend.name == "TRITON_ATTN"
    assert chosen.rejected == {
        "FLASH_ATTN": "flash-attn-4 is not installed",
        "CPU_ATTN": "runs on cpu, not on cuda",
    }


@pytest.mark.usefixtures("fa4")
def test_one_device_without_a_kernel_decides_for_all_ranks() -> None:
    mixed = parse_device_spec("H200") + parse_device_spec("RTX PRO 6000")
    chosen = select_attention_backend("cuda", mixed, PLAIN)
    assert chosen.backend.name == "TRITON_ATTN"
    assert chosen.rejected["FLASH_ATTN"].startswith("has kernels for 9.x, 10.x, 11.x, GPU 0 has 12")


@pytest.mark.usefixtures("fa4")
@pytest.mark.parametrize("needs", [PLAIN, RELATIVE], ids=["plain", "relative"])
@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN", "flash_attn", "triton_attn"])
def test_what_the_user_asks_for_is_taken_where_it_works(needs: AttentionNeeds, name: str) -> None:
    assert choose("H200", needs, name) == name.upper()


@pytest.mark.usefixtures("fa4")
@pytest.mark.parametrize(
    ("spec", "name", "fix"),
    [
        ("RTX PRO 6000", "FLASH_ATTN", "--attention-backend TRITON_ATTN"),
        ("H200", "CPU_ATTN", "--attention-backend FLASH_ATTN or TRITON_ATTN"),
        ("cpu", "FLASH_ATTN", "--attention-backend CPU_ATTN"),
    ],
)
def test_a_forced_backend_that_cannot_work_is_refused_with_those_that_can(
    spec: str, name: str, fix: str
) -> None:
    with pytest.raises(UnsupportedHardwareError) as caught:
        choose(spec, requested=name)
    (finding,) = caught.value.findings
    assert finding.code == "attention-backend"
    assert finding.fix == fix
    assert finding.why.startswith(f"{name}: ")
    assert caught.value.exit_code == ExitCode.HARDWARE


def test_an_empty_choice_explains_every_backend() -> None:
    needs = AttentionNeeds(frozenset({4096}), "bfloat16")
    with pytest.raises(UnsupportedHardwareError) as caught:
        choose("A100", needs)
    (finding,) = caught.value.findings
    assert all(name in finding.why for name in BACKENDS)


def test_an_unknown_backend_is_wrong_usage() -> None:
    with pytest.raises(UsageError) as caught:
        choose("A100", requested="FLASHINFER")
    assert "TRITON_ATTN" in caught.value.findings[0].fix


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=list(BACKENDS))
def test_the_default_block_size_is_one_that_the_kernels_take(backend: AttentionBackend) -> None:
    assert backend.block_size in backend.block_sizes
