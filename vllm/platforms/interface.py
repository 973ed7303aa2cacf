# SPDX-License-Identifier: Apache-2.0
"""What the rest of the engine may ask of a machine. Torch-free, and no CUDA context is made."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class DeviceCapability(NamedTuple):
    """CUDA compute capability, or a gfx version on ROCm; compares like a tuple."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    def to_int(self) -> int:
        """12.0 as 120."""
        return self.major * 10 + self.minor


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator (or the host) that a rank may use; None stands for "cannot be told"."""

    index: int
    """Place among the visible devices: what torch calls cuda:index."""
    name: str
    capability: DeviceCapability | None
    memory_total: int | None = None
    """Bytes."""
    memory_free: int | None = None
    uuid: str = ""
    pci_bus_id: str = ""
    is_unified: bool = False
    """Shares the host's memory, whose free figure then counts."""


class Platform:
    """A kind of machine. Class methods only: there is one machine, found out on first use."""

    device_type = ""
    """torch's name of the device."""
    display_name = ""

    @classmethod
    def devices(cls) -> tuple[Device, ...]:
        """Visible devices in the order in which ranks take them; () if they cannot be told."""
        return ()

    @classmethod
    def device_count(cls) -> int:
        """Number of visible devices."""
        return len(cls.devices())

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        """Capability of a visible device. Raises `RuntimeError` if it cannot be queried."""
        return cls._device(device_id).capability

    @classmethod
    def has_device_capability(cls, capability: tuple[int, int], device_id: int = 0) -> bool:
        """Whether the device is known to have at least `capability`."""
        found = cls.get_device_capability(device_id)
        return found is not None and found >= capability

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Marketing name. Raises `RuntimeError` if it cannot be queried."""
        return cls._device(device_id).name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int | None:
        """Bytes. Raises `RuntimeError` if the device cannot be queried."""
        return cls._device(device_id).memory_total

    @classmethod
    def problem(cls) -> str | None:
        """Why the devices could not be enumerated, in one line; None if they were."""
        return None

    @classmethod
    def driver_cuda_version(cls) -> tuple[int, int] | None:
        """Newest CUDA version that the driver supports."""
        return None

    @classmethod
    def verify_model_arch(
        cls, model_arch: str, attention_backend: str | None = None, num_devices: int = 1
    ) -> None:
        """Raise `UnsupportedModelError` if one of the first `num_devices` cannot run the model.

        `attention_backend` is the user's explicit choice: a path that needs less may lift a
        restriction. A device that cannot be queried is left to the worker's own check.
        """

    @classmethod
    def is_cuda(cls) -> bool:
        """NVIDIA GPUs."""
        return cls.device_type == "cuda" and not cls.is_rocm()

    @classmethod
    def is_rocm(cls) -> bool:
        """AMD GPUs, which torch calls cuda too."""
        return False

    @classmethod
    def is_cpu(cls) -> bool:
        """No accelerator."""
        return cls.device_type == "cpu"

    @classmethod
    def _device(cls, device_id: int) -> Device:
        devices = cls.devices()
        if device_id >= len(devices):
            why = cls.problem() or f"{len(devices)} visible"
            raise RuntimeError(f"no {cls.display_name} device {device_id} ({why})")
        return devices[device_id]
