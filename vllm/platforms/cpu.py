# SPDX-License-Identifier: Apache-2.0
"""The host's processor as the device."""

from __future__ import annotations

from vllm import envs
from vllm.platforms import host
from vllm.platforms.interface import Device, Platform

GiB = 1 << 30
KV_CACHE_SHARE = 0.4
"""Of the memory that is available once the weights are loaded."""
MAX_KV_CACHE_SHARE = 0.8
"""The same where one sequence of full length needs it."""
MAX_DEFAULT_KV_CACHE = 4 * GiB
"""More than that has to be asked for: a laptop's owner wants the rest."""


class CpuPlatform(Platform):
    """One device: the host, with its available memory."""

    device_type = "cpu"
    display_name = "CPU"

    @classmethod
    def devices(cls) -> tuple[Device, ...]:
        return (
            Device(
                0,
                host.cpu_name(),
                None,
                host.memory_total(),
                host.memory_available(),
                is_unified=True,
            ),
        )

    @classmethod
    def kv_cache_bytes(cls, available: int, sequence_bytes: int) -> int:
        """KV cache where `available` bytes are left: what the user set, or a modest share.

        A sequence of full length (`sequence_bytes`) is worth more than modesty.
        """
        if envs.VLLM_CPU_KVCACHE_SPACE:
            return int(envs.VLLM_CPU_KVCACHE_SPACE * GiB)
        modest = min(MAX_DEFAULT_KV_CACHE, int(available * KV_CACHE_SHARE))
        return max(modest, min(sequence_bytes, int(available * MAX_KV_CACHE_SHARE)))
