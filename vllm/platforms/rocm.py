# SPDX-License-Identifier: Apache-2.0
"""AMD GPUs, read from the kernel's topology files."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from vllm.errors import Diagnostic, ExitCode, UnsupportedModelError
from vllm.logger import init_logger
from vllm.platforms.interface import Device, DeviceCapability, Platform
from vllm.platforms.visible import parse_visible_devices, select_ordinals

logger = init_logger(__name__)

_NODES = Path("/sys/class/kfd/kfd/topology/nodes")

_ROCM_UNSUPPORTED_MODELS: dict[str, str] = {}
"""Architecture to the reason why no AMD GPU runs it."""
_ROCM_PARTIALLY_SUPPORTED_MODELS: dict[str, str] = {}
"""Architecture to what is missing there; the model runs."""


class RocmPlatform(Platform):
    """AMD GPUs; torch calls their devices cuda."""

    device_type = "cuda"
    display_name = "ROCm"

    @classmethod
    def is_rocm(cls) -> bool:
        return True

    @classmethod
    def devices(cls) -> tuple[Device, ...]:
        present = _topology()
        wanted = parse_visible_devices(
            os.environ.get("HIP_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
        )
        if wanted is None:
            return present
        indices = select_ordinals([w for w in wanted if isinstance(w, int)], len(present))
        return tuple(present[i] for i in indices)

    @classmethod
    def verify_model_arch(
        cls, model_arch: str, attention_backend: str | None = None, num_devices: int = 1
    ) -> None:
        if model_arch in _ROCM_UNSUPPORTED_MODELS:
            raise UnsupportedModelError(
                Diagnostic(
                    "unsupported-gpu",
                    f"{model_arch} cannot run on AMD GPUs",
                    why=_ROCM_UNSUPPORTED_MODELS[model_arch],
                    fix="an NVIDIA GPU, or --device cpu",
                    exit_code=ExitCode.HARDWARE,
                )
            )
        if model_arch in _ROCM_PARTIALLY_SUPPORTED_MODELS:
            logger.warning(
                "%s on AMD GPUs: %s", model_arch, _ROCM_PARTIALLY_SUPPORTED_MODELS[model_arch]
            )


@functools.cache
def _topology() -> tuple[Device, ...]:
    devices: list[Device] = []
    for node in sorted(_NODES.glob("*"), key=lambda p: int(p.name) if p.name.isdigit() else -1):
        properties = _properties(node / "properties")
        version = properties.get("gfx_target_version", 0)
        if version == 0:  # a processor
            continue
        major, minor, stepping = version // 10000, version // 100 % 100, version % 100
        name = f"AMD gfx{major}{minor:x}{stepping:x}"
        banks = (_properties(p / "properties") for p in (node / "mem_banks").glob("*"))
        total = sum(bank.get("size_in_bytes", 0) for bank in banks) or None
        devices.append(Device(len(devices), name, DeviceCapability(major, minor), total, total))
    return tuple(devices)


def _properties(file: Path) -> dict[str, int]:
    try:
        pairs = (line.split() for line in file.read_text().splitlines())
        return {p[0]: int(p[1]) for p in pairs if len(p) == 2}
    except (OSError, ValueError):
        return {}
