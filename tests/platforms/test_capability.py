# SPDX-License-Identifier: Apache-2.0
"""Which model runs on which GPU: the deny-list, its message, and what a refusal touches."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nvml_stub import ROOT, environment, run_python, run_vllm
from vllm.models.registry import MODELS
from vllm.platforms.attention import BACKENDS
from vllm.platforms.cuda import _CAPABILITY_RESTRICTED_MODELS

INKLING = ("InklingForConditionalGeneration", "InklingForCausalLM", "InklingMTPModel")
TYPED_FLAGS = (
    ["--tensor-parallel-size", "2", "--tokenizer-mode", "inkling"]  # as users give them
    + ["--trust-remote-code"]
)
REFUSAL = """\
error[unsupported-gpu]: InklingForConditionalGeneration cannot run on NVIDIA RTX PRO 6000 Blackwell Workstation Edition (compute capability 12.0)
  why: the FA4 relative-attention kernel has no paged-KV forward on SM12x
  where: GPU {which} of 2; found before any weight was read
  fix: --attention-backend TRITON_ATTN (portable, not verified on this GPU), or a GPU of compute capability 8.x, 9.0, 10.x or 11.0
  see: docs/models/supported_models.md#inkling
"""  # noqa: E501
_VERDICTS = """
import json, sys
from vllm.errors import UnsupportedModelError
from vllm.platforms.cuda import CudaPlatform
verdicts = {}
for arch in sys.argv[1].split(","):
    try:
        CudaPlatform.verify_model_arch(arch, sys.argv[2] or None, int(sys.argv[3]))
        verdicts[arch] = "allowed"
    except UnsupportedModelError as error:
        verdicts[arch] = error.findings[0].where
print(json.dumps(verdicts))
"""


def verdicts(
    machine: str, backend: str = "", ranks: int = 1, architectures: tuple[str, ...] = INKLING
) -> set[str]:
    """What `verify_model_arch` answers for the architectures: one answer where all are alike."""
    arguments = f"import sys; sys.argv = ['-', {','.join(architectures)!r}, {backend!r}, '{ranks}']"
    return set(json.loads(run_python(arguments + _VERDICTS, machine)).values())


@pytest.fixture
def inkling_directory(tmp_path: Path) -> Path:
    """A model of which only the architecture is known: nothing after it may be looked at."""
    directory = tmp_path / "thinkingmachines" / "Inkling-Small-NVFP4"
    directory.mkdir(parents=True)
    config = {"architectures": [INKLING[0]], "model_type": "inkling_mm_model"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    "machine", ["V100", "T4", "A100", "L4", "H200", "B200", "Thor", "no capability"]
)
def test_inkling_is_allowed_where_no_restriction_names_the_gpu(machine: str) -> None:
    assert verdicts(machine) == {"allowed"}


@pytest.mark.parametrize("machine", ["RTX 5090", "RTX PRO 6000", "GB10"])
def test_inkling_is_refused_on_the_whole_family_12(machine: str) -> None:
    assert verdicts(machine) == {"GPU 0 of 1; found before any weight was read"}


def test_an_explicit_portable_backend_lifts_the_restriction_and_fa4_does_not() -> None:
    assert verdicts("2x RTX PRO 6000", "TRITON_ATTN", 2) == {"allowed"}
    assert verdicts("RTX PRO 6000", "FLASH_ATTN") != {"allowed"}


def test_other_architectures_are_not_restricted() -> None:
    others = tuple(sorted(set(MODELS) - set(INKLING)))
    assert verdicts("RTX PRO 6000", architectures=(*others, "NobodyKnows")) == {"allowed"}


@pytest.mark.parametrize("machine", ["driver mismatch", "driver not loaded", "no device"])
def test_a_device_that_cannot_be_queried_is_left_to_the_worker(machine: str) -> None:
    assert verdicts(machine, ranks=2) == {"allowed"}


@pytest.mark.parametrize(
    ("machine", "ranks", "expected"),
    [
        ("H100 + RTX PRO 6000", 1, "allowed"),
        ("H100 + RTX PRO 6000", 2, "GPU 1 of 2; found before any weight was read"),
        ("RTX PRO 6000 + H100", 1, "GPU 0 of 1; found before any weight was read"),
        ("RTX PRO 6000 + H100", 2, "GPU 0 of 2; found before any weight was read"),
        ("6x H100 + 2x RTX PRO 6000", 6, "allowed"),
        ("6x H100 + 2x RTX PRO 6000", 8, "GPU 6 and 7 of 8; found before any weight was read"),
    ],
)
def test_every_device_that_the_run_will_use_is_checked_and_no_other(
    machine: str, ranks: int, expected: str
) -> None:
    assert verdicts(machine, ranks=ranks) == {expected}


@pytest.mark.parametrize("visible", ["6,7", "GPU-6,GPU-7"])
def test_visible_devices_are_the_checked_ones(inkling_directory: Path, visible: str) -> None:
    done = run_vllm(
        "serve",
        str(inkling_directory),
        *TYPED_FLAGS,
        machine="6x H100 + 2x RTX PRO 6000",
        CUDA_VISIBLE_DEVICES=visible,
    )
    assert done.returncode == 3
    assert REFUSAL.format(which="0 and 1") in done.stderr


@pytest.mark.parametrize("command", ["serve", "preflight"])
@pytest.mark.parametrize(
    ("machine", "which"),
    [("2x RTX PRO 6000", "0 and 1"), ("H100 + RTX PRO 6000", "1"), ("RTX PRO 6000 + H100", "0")],
)
def test_the_refusal_is_one_message_and_exit_status_3(
    inkling_directory: Path, command: str, machine: str, which: str
) -> None:
    done = run_vllm(
        command, str(inkling_directory), *TYPED_FLAGS, machine=machine, VLLM_LOGGING_LEVEL="ERROR"
    )
    assert done.stderr == REFUSAL.format(which=which)
    assert done.stdout == ""
    assert done.returncode == 3


@pytest.mark.parametrize("flag", ["TRITON_ATTN", "triton_attn"])
def test_the_backend_named_by_the_refusal_gets_past_it(inkling_directory: Path, flag: str) -> None:
    arguments = ["serve", str(inkling_directory), *TYPED_FLAGS, "--attention-backend", flag]
    done = run_vllm(*arguments, machine="2x RTX PRO 6000")
    assert "unsupported-gpu" not in done.stderr
    assert done.returncode == 4  # the directory has no sizes


def test_the_llm_class_refuses_with_the_same_words(inkling_directory: Path) -> None:
    code = f"""
from vllm import LLM
from vllm.errors import UnsupportedModelError
try:
    LLM({str(inkling_directory)!r}, tensor_parallel_size=2)
except UnsupportedModelError as error:
    import sys
    print(error)
    print("torch" in sys.modules)
"""
    printed = run_python(code, "2x RTX PRO 6000")
    assert printed == REFUSAL.format(which="0 and 1") + "False"


def test_a_refusal_starts_no_process_and_opens_neither_cuda_nor_torch_nor_weights(
    inkling_directory: Path,
) -> None:
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-qo", os.devnull, "true"]).returncode:
        pytest.skip("needs a working strace")
    weights = inkling_directory / "model.safetensors"
    weights.write_bytes(b"\0" * 1024)
    trace = inkling_directory.parent / "trace"
    done = subprocess.run(
        [strace, "-fqo", str(trace), "-e", "trace=process,openat", sys.executable]
        + ["-m", "vllm.entrypoints.cli.main", "serve", str(inkling_directory), *TYPED_FLAGS],
        env=environment("2x RTX PRO 6000"),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    calls = trace.read_text()
    assert done.returncode == 3, done.stderr
    assert len(re.findall(r"execve\(", calls)) == 1
    assert not re.findall(r" v?fork\(| clone3?\(", calls)
    assert "libnvidia-ml.so.1" in calls  # the trace does see what is opened
    for untouched in ("libcuda.", "libcudart", "/torch/", weights.name):
        assert untouched not in calls, untouched


def test_the_deny_table_agrees_with_the_kernel_s_own_constants() -> None:
    source = ROOT / "vllm/models/inkling/nvidia/ops/fa4_rel_attention.py"
    majors = {}
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            name = node.targets[0]
            if isinstance(name, ast.Name) and name.id.endswith("_MAJORS"):
                majors[name.id] = frozenset(ast.literal_eval(node.value.args[0]))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            if isinstance(node.targets[0], ast.Name):
                majors[node.targets[0].id] = node.value.value
    assert set(_CAPABILITY_RESTRICTED_MODELS) == set(INKLING)
    for restriction in _CAPABILITY_RESTRICTED_MODELS.values():
        assert restriction.denied_majors == majors["_NO_PAGED_KV_MAJORS"]
        assert not restriction.denied_majors & majors["_SPLIT_KV_MAJORS"]
        assert restriction.lifted_by <= set(BACKENDS)
        page, anchor = restriction.docs.split("#")
        assert f"## {anchor}" in (ROOT / page).read_text().lower()


def test_restricted_architectures_are_registered() -> None:
    assert set(_CAPABILITY_RESTRICTED_MODELS) <= set(MODELS)
