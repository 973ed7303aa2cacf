# SPDX-License-Identifier: Apache-2.0
"""`current_platform`: the machine that this process runs on, found out on first use.

Importing this package asks nothing; the first attribute does, through NVML or the
kernel's files and never through torch.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from vllm import envs
from vllm.platforms.interface import Device, DeviceCapability, Platform

if TYPE_CHECKING:
    current_platform: type[Platform]

__all__ = [
    "Device",
    "DeviceCapability",
    "Platform",
    "current_platform",
    "planned_platform",
    "platform_for",
    "set_platform",
]


def platform_for(device: str) -> type[Platform]:
    """The platform class of `--device`: auto, cuda, rocm or cpu."""
    if device == "auto":
        return _detect()
    if device == "cpu":
        from vllm.platforms.cpu import CpuPlatform

        return CpuPlatform
    if device == "rocm":
        from vllm.platforms.rocm import RocmPlatform

        return RocmPlatform
    from vllm.platforms.cuda import CudaPlatform

    return CudaPlatform


def planned_platform(devices: tuple[Device, ...]) -> type[Platform]:
    """A machine that is not here: the platform of `devices`, which then are all it has."""
    base = platform_for("cpu" if devices[0].capability is None else "cuda")

    class PlannedPlatform(base):  # type: ignore[misc, valid-type]
        @classmethod
        def devices(cls) -> tuple[Device, ...]:
            return devices

        @classmethod
        def problem(cls) -> str | None:
            return None

        @classmethod
        def driver_cuda_version(cls) -> tuple[int, int] | None:
            return None

    return PlannedPlatform


@functools.cache
def _detect() -> type[Platform]:
    # CUDA and NVML must count devices alike, in this process and in its children.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if envs.VLLM_TARGET_DEVICE:
        return platform_for(envs.VLLM_TARGET_DEVICE)
    from vllm.platforms.cuda import looks_like_cuda

    if looks_like_cuda():
        return platform_for("cuda")
    rocm = platform_for("rocm")
    return rocm if os.path.exists("/dev/kfd") and rocm.devices() else platform_for("cpu")


_override: type[Platform] | None = None


def set_platform(platform: type[Platform]) -> None:
    """Make `platform` the current one (`--device`); every later reader sees it."""
    global _override
    _override = platform


def __getattr__(name: str) -> type[Platform]:
    if name == "current_platform":
        return _override or _detect()
    raise AttributeError(name)
