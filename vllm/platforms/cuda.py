# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs: enumeration, and which models they cannot run."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from vllm.errors import Diagnostic, ExitCode, UnsupportedModelError
from vllm.logger import init_logger
from vllm.platforms import host, nvml
from vllm.platforms.interface import Device, DeviceCapability, Platform

logger = init_logger(__name__)

_DRIVER_NODES = ("/dev/nvidiactl", "/dev/nvhost-ctrl", "/dev/nvmap", "/dev/dxg")
"""Device nodes of an NVIDIA driver: desktop and server, Jetson (two), WSL."""


@dataclasses.dataclass(frozen=True)
class CapabilityRestriction:
    """Why some capabilities cannot run an architecture, and what lifts that."""

    denied_majors: frozenset[int]
    """Whole families: 12 stands for 12.0 and 12.1."""
    missing_kernel: str
    lifted_by: frozenset[str]
    """Attention backends that do without the missing kernel, when asked for explicitly."""
    runs_on: str
    """Capabilities to offer instead."""
    docs: str


_INKLING = CapabilityRestriction(
    denied_majors=frozenset({12}),
    missing_kernel="the FA4 relative-attention kernel has no paged-KV forward on SM12x",
    lifted_by=frozenset({"TRITON_ATTN"}),
    runs_on="8.x, 9.0, 10.x or 11.0",
    docs="docs/models/supported_models.md#inkling",
)

# A deny-list: what is not named here is allowed, so that a new kernel path has no guard to
# delete. The constants of vllm/models/inkling/nvidia/ops/fa4_rel_attention.py say the same
# of the kernel itself; a test holds both together.
_CAPABILITY_RESTRICTED_MODELS: dict[str, CapabilityRestriction] = {
    "InklingForConditionalGeneration": _INKLING,
    "InklingForCausalLM": _INKLING,
    "InklingMTPModel": _INKLING,
}


class CudaPlatformBase(Platform):
    """What every way of enumerating NVIDIA devices shares."""

    device_type = "cuda"
    display_name = "CUDA"

    @classmethod
    def verify_model_arch(
        cls, model_arch: str, attention_backend: str | None = None, num_devices: int = 1
    ) -> None:
        restriction = _CAPABILITY_RESTRICTED_MODELS.get(model_arch)
        if restriction is None or attention_backend in restriction.lifted_by:
            return
        denied: list[tuple[int, str, DeviceCapability]] = []
        for index in range(max(1, num_devices)):
            try:
                capability = cls.get_device_capability(index)
            except RuntimeError as error:
                logger.info("Capability check of GPU %d skipped: %s", index, error)
                break
            if capability is not None and capability.major in restriction.denied_majors:
                denied.append((index, cls._name_or_unknown(index), capability))
        if denied:
            raise UnsupportedModelError(
                refusal(model_arch, restriction, denied, max(1, num_devices))
            )

    @classmethod
    def _name_or_unknown(cls, index: int) -> str:
        try:
            return cls.get_device_name(index)
        except RuntimeError:
            return "this GPU"


def capability_restriction(model_arch: str) -> CapabilityRestriction | None:
    """What keeps some capabilities from running an architecture; None: nothing."""
    return _CAPABILITY_RESTRICTED_MODELS.get(model_arch)


def refusal(
    model_arch: str,
    restriction: CapabilityRestriction,
    denied: list[tuple[int, str, DeviceCapability]],
    num_devices: int,
) -> Diagnostic:
    """The finding for devices (index, name, capability) that cannot run `model_arch`."""
    _, name, capability = denied[0]
    indices = [str(index) for index, _, _ in denied]
    listed = " and ".join(filter(None, [", ".join(indices[:-1]), indices[-1]]))
    backends = ", ".join(sorted(restriction.lifted_by))
    return Diagnostic(
        "unsupported-gpu",
        f"{model_arch} cannot run on {name} (compute capability {capability})",
        why=restriction.missing_kernel,
        where=f"GPU {listed} of {num_devices}; found before any weight was read",
        fix=f"--attention-backend {backends} (portable, not verified on this GPU), or a GPU of "
        f"compute capability {restriction.runs_on}",
        see=restriction.docs,
        exit_code=ExitCode.HARDWARE,
    )


class NvmlCudaPlatform(CudaPlatformBase):
    """Devices through NVML; where it is missing, through torch in a child process."""

    @classmethod
    def devices(cls) -> tuple[Device, ...]:
        found = nvml.enumerate_devices()
        devices = _ask_torch() if found.is_missing else found.devices
        return tuple(_with_host_memory(d) if d.is_unified else d for d in devices)

    @classmethod
    def num_present(cls) -> int:
        """Devices of the machine, visible or not."""
        return max(nvml.enumerate_devices().num_present, cls.device_count())

    @classmethod
    def problem(cls) -> str | None:
        found = nvml.enumerate_devices()
        return None if found.is_missing and _ask_torch() else found.problem

    @classmethod
    def driver_cuda_version(cls) -> tuple[int, int] | None:
        return nvml.enumerate_devices().driver_cuda


CudaPlatform = NvmlCudaPlatform


def looks_like_cuda() -> bool:
    """Whether the machine has an NVIDIA driver, whatever NVML says."""
    found = nvml.enumerate_devices()
    if found.num_present or not (found.is_missing or found.problem):
        return found.num_present > 0
    return any(os.path.exists(node) for node in _DRIVER_NODES) or not found.is_missing


def _with_host_memory(device: Device) -> Device:
    return dataclasses.replace(
        device, memory_total=host.memory_total(), memory_free=host.memory_available()
    )


_TORCH_QUERY = """
import json, torch
print(json.dumps([
    [p.name, p.major, p.minor, p.total_memory, bool(getattr(p, "is_integrated", False))]
    for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))]))
"""


@functools.cache
def _ask_torch() -> tuple[Device, ...]:
    """Devices as torch sees them, in a child process: this one must not initialise CUDA."""
    if not any(Path(node).exists() for node in _DRIVER_NODES):
        return ()
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _TORCH_QUERY], capture_output=True, timeout=120, check=True
        )
        rows = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
    return tuple(
        Device(i, name, DeviceCapability(major, minor), total, None, is_unified=integrated)
        for i, (name, major, minor, total, integrated) in enumerate(rows)
    )
