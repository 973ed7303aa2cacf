# SPDX-License-Identifier: Apache-2.0
"""The host's own figures: memory and cores that this process may really use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def memory_total() -> int:
    """Bytes of memory, the container's limit if there is one."""
    limit = _number(_CGROUP / "memory.max")
    total = _meminfo("MemTotal") or 0
    return min(total, limit) if limit else total


def memory_available() -> int:
    """Bytes that can be had without swapping; page cache counts as available."""
    available = _meminfo("MemAvailable") or memory_total()
    limit = _number(_CGROUP / "memory.max")
    if limit is None:
        return available
    used = _number(_CGROUP / "memory.current") or 0
    return max(0, min(available, limit - used + _reclaimable()))


def usable_cores() -> set[int]:
    """Numbers of the cores that the affinity mask leaves to this process."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def num_cores() -> int:
    """Cores that the affinity mask and the container's quota leave to this process."""
    cores = len(usable_cores())
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def cpu_name() -> str:
    """The processor's name, such as "AMD EPYC 9554"."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    import platform

    return platform.machine()


def has_bfloat16_instructions() -> bool:
    """Whether the processor multiplies bfloat16 in hardware."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return any(f" {flag}" in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def _meminfo(key: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
        return None if text == "max" else int(text)
    except (OSError, ValueError):
        return None


def _reclaimable() -> int:
    try:
        for line in (_CGROUP / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0
