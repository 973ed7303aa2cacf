# SPDX-License-Identifier: Apache-2.0
"""Facts about known GPUs, and `--device`: plans for hardware that is not here."""

from __future__ import annotations

import dataclasses
import difflib
import re

from vllm.errors import Diagnostic, ExitCode, UsageError
from vllm.platforms.interface import Device, DeviceCapability

GiB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One model's figures; bandwidth in GB/s, matrix rate in dense bf16 (or fp16) TFLOP/s."""

    name: str
    capability: DeviceCapability
    memory_gib: float
    bandwidth: int
    tflops: int
    is_unified: bool = False


def _gpu(
    name: str,
    capability: str,
    memory_gib: float,
    bandwidth: int,
    tflops: int,
    unified: bool = False,
) -> Gpu:
    major, minor = capability.split(".")
    return Gpu(
        name, DeviceCapability(int(major), int(minor)), memory_gib, bandwidth, tflops, unified
    )


# Vendors' data sheets. Longer names come before those that they contain.
KNOWN_GPUS = (
    _gpu("V100", "7.0", 32, 900, 125),
    _gpu("T4", "7.5", 16, 320, 65),
    _gpu("A100-PCIE-40GB", "8.0", 40, 1555, 312),
    _gpu("A100", "8.0", 80, 2039, 312),
    _gpu("A10G", "8.6", 24, 600, 70),
    _gpu("A10", "8.6", 24, 600, 125),
    _gpu("A40", "8.6", 48, 696, 150),
    _gpu("RTX A6000", "8.6", 48, 768, 155),
    _gpu("RTX 3090", "8.6", 24, 936, 71),
    _gpu("Jetson AGX Orin", "8.7", 64, 205, 43, True),
    _gpu("L40S", "8.9", 48, 864, 362),
    _gpu("L40", "8.9", 48, 864, 181),
    _gpu("L4", "8.9", 24, 300, 121),
    _gpu("RTX 6000 Ada", "8.9", 48, 960, 364),
    _gpu("RTX 4090", "8.9", 24, 1008, 165),
    _gpu("GH200", "9.0", 96, 4000, 989),
    _gpu("H200", "9.0", 141, 4800, 989),
    _gpu("H100 PCIe", "9.0", 80, 2000, 756),
    _gpu("H100 NVL", "9.0", 94, 3900, 835),
    _gpu("H100", "9.0", 80, 3350, 989),
    _gpu("H20", "9.0", 96, 4000, 148),
    _gpu("GB300", "10.3", 288, 8000, 2500),
    _gpu("B300", "10.3", 288, 8000, 2250),
    _gpu("GB200", "10.0", 186, 8000, 2500),
    _gpu("B200", "10.0", 180, 8000, 2250),
    _gpu("Jetson AGX Thor", "11.0", 128, 273, 250, True),
    _gpu("Thor", "11.0", 128, 273, 250, True),
    _gpu("RTX PRO 6000", "12.0", 96, 1792, 500),
    _gpu("RTX PRO 5000", "12.0", 48, 1344, 300),
    _gpu("RTX 5090", "12.0", 32, 1792, 210),
    _gpu("RTX 5080", "12.0", 16, 960, 113),
    _gpu("GB10", "12.1", 128, 273, 125, True),
    _gpu("DGX Spark", "12.1", 128, 273, 125, True),
    _gpu("MI300X", "9.4", 192, 5300, 1307),
    _gpu("MI325X", "9.4", 256, 6000, 1307),
    _gpu("MI355X", "9.5", 288, 8000, 2500),
)


def known_gpu(name: str) -> Gpu | None:
    """The record whose name the device's name contains."""
    text = _words(name)
    return next((g for g in KNOWN_GPUS if f" {_words(g.name)} " in f" {text} "), None)


def _words(name: str) -> str:
    return " ".join(re.sub(r"[^a-z0-9]+", " ", name.lower()).split())


_CAPABILITY = re.compile(r"sm_?(\d{2,3})[af]?", re.IGNORECASE)
# Nine digits are more than any machine has; int() refuses thousands, float() gives infinity.
_COUNTED = re.compile(r"(\d{1,9})\s*x\s*(.+)", re.IGNORECASE)
_MEMORY = re.compile(r"(.+):\s*(\d{1,9}(?:\.\d{1,9})?)\s*(?:GiB|GB|G)", re.IGNORECASE)
MAX_DEVICES = 1024


def parse_device_spec(spec: str) -> tuple[Device, ...]:
    """Devices of `--device`: `sm_120`, `sm_120:96GiB`, `RTX PRO 6000`, `2xH200`, `cpu`.

    A bare capability has no memory figure. Raises `UsageError` for a name that is not known.
    """
    text, count = spec.strip(), 1
    if (counted := _COUNTED.fullmatch(text)) is not None:
        count, text = int(counted.group(1)), counted.group(2).strip()
        if not 1 <= count <= MAX_DEVICES:
            raise _unknown(spec, f"{count} devices; 1 to {MAX_DEVICES} can be planned for")
    memory = None
    if (sized := _MEMORY.fullmatch(text)) is not None:
        text, memory = sized.group(1).strip(), int(float(sized.group(2)) * GiB)
    device = _one_device(spec, text, memory)
    return tuple(dataclasses.replace(device, index=i) for i in range(count))


def _one_device(spec: str, text: str, memory: int | None) -> Device:
    if text.lower() == "cpu":
        return Device(0, "CPU", None, memory, memory, is_unified=True)
    if (match := _CAPABILITY.fullmatch(text)) is not None:
        digits = match.group(1)
        capability = DeviceCapability(int(digits[:-1]), int(digits[-1]))
        return Device(0, f"SM {capability}", capability, memory, memory)
    gpu = known_gpu(text)
    if gpu is None:
        names = {_words(g.name): g.name for g in KNOWN_GPUS}
        near = difflib.get_close_matches(_words(text), names, n=3, cutoff=0.5)
        raise _unknown(spec, f"nearest: {', '.join(names[n] for n in near)}" if near else "")
    total = memory or int(gpu.memory_gib * GiB)
    return Device(0, f"NVIDIA {gpu.name}", gpu.capability, total, total, is_unified=gpu.is_unified)


def _unknown(spec: str, why: str) -> UsageError:
    return UsageError(
        Diagnostic(
            "device-unknown",
            f"--device {spec!r} names no device",
            why=why,
            fix='sm_120, sm_120:96GiB, "RTX PRO 6000", 2xH200, or cpu',
            exit_code=ExitCode.USAGE,
        )
    )
