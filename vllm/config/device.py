# SPDX-License-Identifier: Apache-2.0
"""What kind of device runs the model."""

from __future__ import annotations

import dataclasses

from vllm.config.fields import check_values, option, raise_usage
from vllm.platforms import Device, Platform, planned_platform, platform_for


@dataclasses.dataclass
class DeviceConfig:
    """Device."""

    device: str = option("auto", choices=("auto", "cuda", "rocm", "cpu"))
    """Kind of device; auto: what the machine has."""
    planned_devices: tuple[Device, ...] | None = option(None, cli=False)
    """Devices that are not here, for `vllm preflight --device`; no engine can start then."""

    def __post_init__(self) -> None:
        raise_usage(check_values(self))

    @property
    def platform(self) -> type[Platform]:
        """The platform that `device` names."""
        if self.planned_devices:
            return planned_platform(self.planned_devices)
        return platform_for(self.device)

    @property
    def kind(self) -> str:
        """cuda, rocm or cpu."""
        platform = self.platform
        return "rocm" if platform.is_rocm() else platform.device_type

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices in the order of ranks; () where they cannot be told."""
        return self.platform.devices()
