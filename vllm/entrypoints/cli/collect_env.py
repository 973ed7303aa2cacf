# SPDX-License-Identifier: Apache-2.0
"""`vllm collect-env`: what a bug report should say of this machine. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform as python_platform
import sys

import vllm
from vllm import envs
from vllm.engine.arg_utils import FlexibleArgumentParser
from vllm.platforms import current_platform, host

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub",
    "flash-attn-4", "nvidia-ml-py", "pyzmq", "msgspec", "fastapi", "uvicorn", "llguidance",
)  # fmt: skip
_SHOWN = ("CUDA_", "NVIDIA_", "HIP_", "HF_", "OMP_", "TORCH_", "TRITON_")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def main(arguments: list[str]) -> int:
    """Print one fact a line."""
    FlexibleArgumentParser(prog="vllm collect-env", description=__doc__).parse_args(arguments)
    for name, value in _facts():
        print(f"{name:<24} {value}")
    return 0


def _facts() -> list[tuple[str, str]]:
    gib = 2**30
    facts = [
        ("vllm", vllm.__version__),
        ("python", sys.version.split()[0]),
        ("system", python_platform.platform()),
        ("processor", f"{host.cpu_name()}, {host.num_cores()} cores usable"),
        (
            "memory",
            f"{host.memory_total() / gib:.1f} GiB, "
            f"{host.memory_available() / gib:.1f} GiB available",
        ),
        ("platform", current_platform.display_name),
    ]
    if problem := current_platform.problem():
        facts.append(("devices", problem))
    if not current_platform.is_cpu():
        for device in current_platform.devices():
            memory = "memory not told"
            if device.memory_total is not None:
                memory = f"{device.memory_total / gib:.1f} GiB"
            facts.append(
                (
                    f"GPU {device.index}",
                    f"{device.name}, {device.capability}, {memory}, {device.uuid}",
                )
            )
    facts += [(name, _version(name)) for name in PACKAGES]
    names = sorted(n for n in os.environ if n.startswith(_SHOWN) or n in envs.VARIABLES)
    facts += [(n, _value(n)) for n in names]
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _value(name: str) -> str:
    if any(word in name for word in _SECRET):
        return "(set, not shown)"
    return os.environ[name]
