# SPDX-License-Identifier: Apache-2.0
"""Machines that are not here: a C library with NVML's ABI, in place of the driver's.

`environment("2x RTX PRO 6000")` is the environment of a child process in which the real
nvidia-ml-py, and so the real command line, sees that machine. It is built with gcc, once a
process; no Python is replaced. What a machine reports is one string (see nvml_stub.c).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("nvml_stub.c")
ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class StubGpu:
    """A device as NVML reports it; None: "not supported"."""

    name: str
    capability: str | None
    total_mib: int | None
    mig: str = "-"

    def spec(self, index: int) -> str:
        total = "-" if self.total_mib is None else self.total_mib
        free = 0 if self.total_mib is None else self.total_mib - 600
        fields = (
            self.name,
            self.capability or "-",
            total,
            free,
            uuid_of(index),
            f"00000000:{index + 1:02X}:00.0",
            self.mig,
        )
        return "|".join(map(str, fields))


def uuid_of(index: int) -> str:
    """UUID of the device `index` of every machine; its first hexadecimal digit is unique."""
    return f"GPU-{index:x}a2b4c6d-1111-2222-3333-444455556666"


def mig_uuid(index: int) -> str:
    """UUID of the MIG instance `index`."""
    return f"MIG-{index:x}f0e1d2c-9999-8888-7777-666655554444"


V100 = StubGpu("Tesla V100-SXM2-32GB", "7.0", 32768)
T4 = StubGpu("Tesla T4", "7.5", 15360, "off")
A100 = StubGpu("NVIDIA A100-SXM4-80GB", "8.0", 81920, "off")
L4 = StubGpu("NVIDIA L4", "8.9", 23034)
H100 = StubGpu("NVIDIA H100 80GB HBM3", "9.0", 81559, "off")
H200 = StubGpu("NVIDIA H200", "9.0", 143771, "off")
B200 = StubGpu("NVIDIA B200", "10.0", 183359, "off")
THOR = StubGpu("NVIDIA Thor", "11.0", 125772)
RTX_PRO_6000 = StubGpu("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "12.0", 97887, "off")
RTX_5090 = StubGpu("NVIDIA GeForce RTX 5090", "12.0", 32607)
GB10 = StubGpu("NVIDIA GB10", "12.1", None)
NO_CAPABILITY = StubGpu("NVIDIA Graphics Device", None, 81920)
A100_MIG = dataclasses.replace(
    A100, mig=f"on,{mig_uuid(0)}:40192,{mig_uuid(1)}:20096,{mig_uuid(2)}:9856"
)
A100_MIG_EMPTY = dataclasses.replace(A100, mig="on")


def _machine(*gpus: StubGpu) -> str:
    return ";".join(gpu.spec(index) for index, gpu in enumerate(gpus))


MACHINES = {
    "no device": "",
    "V100": _machine(V100),
    "T4": _machine(T4),
    "A100": _machine(A100),
    "L4": _machine(L4),
    "H200": _machine(H200),
    "2x H200": _machine(H200, H200),
    "B200": _machine(B200),
    "Thor": _machine(THOR),
    "RTX 5090": _machine(RTX_5090),
    "RTX PRO 6000": _machine(RTX_PRO_6000),
    "2x RTX PRO 6000": _machine(RTX_PRO_6000, RTX_PRO_6000),
    "GB10": _machine(GB10),
    "H100 + RTX PRO 6000": _machine(H100, RTX_PRO_6000),
    "RTX PRO 6000 + H100": _machine(RTX_PRO_6000, H100),
    "6x H100 + 2x RTX PRO 6000": _machine(*[H100] * 6, RTX_PRO_6000, RTX_PRO_6000),
    "A100 with MIG": _machine(A100_MIG),
    "A100 with MIG and no instance": _machine(A100_MIG_EMPTY),
    "no capability": _machine(NO_CAPABILITY),
    "driver not loaded": "error=9",
    "driver mismatch": "error=18",
}


@functools.cache
def _library_directory() -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="nvml-stub-")
    compiler = shutil.which("gcc") or shutil.which("cc") or "gcc"
    library = Path(directory.name, "libnvidia-ml.so.1")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-D_GNU_SOURCE", "-O1"]
        + ["-o", str(library), str(_SOURCE)],
        check=True,
    )
    return directory


def environment(machine: str, **variables: str) -> dict[str, str]:
    """Environment of a child that runs on `machine` (a key of MACHINES), with `variables` set.

    Device selections of this process are dropped. Raises `KeyError` for an unknown machine.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.endswith("_VISIBLE_DEVICES") and name != "VLLM_TARGET_DEVICE"
    }
    path = os.pathsep.join(filter(None, [_library_directory().name, kept.get("LD_LIBRARY_PATH")]))
    stub = {"VLLM_NVML_STUB": MACHINES[machine], "LD_LIBRARY_PATH": path, "HF_HUB_OFFLINE": "1"}
    return {**kept, **stub, **variables}


def run_python(code: str, machine: str, **variables: str) -> str:
    """What `code` prints when it runs on `machine`. Raises `AssertionError` if it fails."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(machine, **variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_vllm(*arguments: str, machine: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The real command line on `machine`, with its streams as text."""
    return subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments],
        env=environment(machine, **variables),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
