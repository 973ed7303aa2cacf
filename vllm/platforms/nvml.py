# SPDX-License-Identifier: Apache-2.0
"""NVIDIA devices through NVML: milliseconds, no CUDA context, shut down again.

The engine sets CUDA_DEVICE_ORDER=PCI_BUS_ID, NVML's own order, so that both count alike.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

from vllm.platforms.interface import Device, DeviceCapability
from vllm.platforms.visible import parse_visible_devices, select_ordinals, select_uuids


@dataclasses.dataclass(frozen=True)
class Enumeration:
    """What NVML said."""

    devices: tuple[Device, ...] = ()
    """Visible ones."""
    num_present: int = 0
    """Devices of the machine, visible or not."""
    problem: str | None = None
    """Why NVML could not be used; None if it was."""
    is_missing: bool = False
    """No NVML library at all: no NVIDIA driver, or a platform that has none."""
    driver_cuda: tuple[int, int] | None = None


@functools.cache
def enumerate_devices() -> Enumeration:
    """Visible devices; asked once a process."""
    try:
        import pynvml
    except ImportError:
        return Enumeration(problem="the nvidia-ml-py package is not installed", is_missing=True)
    if not hasattr(pynvml, "nvmlDeviceGetCudaComputeCapability"):
        return Enumeration(problem="the module pynvml is not the one of nvidia-ml-py")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        # A library without its driver is what CUDA images bring to machines without a GPU.
        missing = isinstance(
            error, (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded)
        )
        return Enumeration(problem=_reason(error), is_missing=missing)
    try:
        return _enumerate(pynvml)
    except pynvml.NVMLError as error:
        return Enumeration(problem=_reason(error))
    finally:
        pynvml.nvmlShutdown()


def _reason(error: Exception) -> str:
    text = str(error)
    if "mismatch" in text.lower():
        return "NVML: the driver in the kernel and the driver's library have different versions"
    return f"NVML: {text}"


def _enumerate(pynvml: Any) -> Enumeration:
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    devices = [
        _describe(pynvml, index, handle) for index, handle in enumerate(_visible(pynvml, handles))
    ]
    return Enumeration(tuple(devices), len(handles), driver_cuda=_driver_cuda(pynvml))


def _visible(pynvml: Any, handles: list[Any]) -> list[Any]:
    """Handles in the order in which CUDA will count them; MIG instances in place of parents."""
    wanted = parse_visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if wanted and isinstance(wanted[0], str) and wanted[0].startswith("MIG-"):
        return _mig_by_uuid(pynvml, handles, [str(w) for w in wanted])
    if wanted is None:
        chosen = handles
    elif wanted and isinstance(wanted[0], str):
        uuids = [pynvml.nvmlDeviceGetUUID(h) for h in handles]
        chosen = [handles[i] for i in select_uuids([str(w) for w in wanted], uuids)]
    else:
        chosen = [handles[i] for i in select_ordinals([int(w) for w in wanted], len(handles))]
    return [instance for h in chosen for instance in _usable(pynvml, h)]


def _usable(pynvml: Any, handle: Any) -> list[Any]:
    """The device itself; with MIG on, CUDA sees the first instance only, or nothing."""
    instances = _mig_instances(pynvml, handle)
    return [handle] if instances is None else instances[:1]


def _mig_instances(pynvml: Any, handle: Any) -> list[Any] | None:
    """MIG instances of a device; None if MIG is off or unknown to it."""
    try:
        enabled, _ = pynvml.nvmlDeviceGetMigMode(handle)
        if enabled != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return None
    instances = []
    for index in range(count):
        try:
            instances.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except pynvml.NVMLError:
            continue
    return instances


def _mig_by_uuid(pynvml: Any, handles: list[Any], wanted: list[str]) -> list[Any]:
    instances = [m for h in handles for m in _mig_instances(pynvml, h) or []]
    uuids = [pynvml.nvmlDeviceGetUUID(m) for m in instances]
    return [instances[i] for i in select_uuids(wanted, uuids)]


def _describe(pynvml: Any, index: int, handle: Any) -> Device:
    parent = handle
    if _query(pynvml.nvmlDeviceIsMigDeviceHandle, handle):
        # Capability and PCI id are the parent's, memory is the slice's.
        parent = _query(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle) or handle
    capability = _query(pynvml.nvmlDeviceGetCudaComputeCapability, parent)
    memory = _query(pynvml.nvmlDeviceGetMemoryInfo, handle)
    pci = _query(pynvml.nvmlDeviceGetPciInfo, parent)
    return Device(
        index=index,
        name=_text(_query(pynvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"),
        capability=DeviceCapability(*capability) if capability else None,
        memory_total=memory.total if memory else None,
        memory_free=memory.free if memory else None,
        uuid=_text(_query(pynvml.nvmlDeviceGetUUID, handle) or ""),
        pci_bus_id=_text(pci.busId) if pci else "",
        is_unified=memory is None,
    )


def _query(function: Any, handle: Any) -> Any:
    """One figure, or None where this device does not report it."""
    import pynvml

    try:
        return function(handle)
    except (pynvml.NVMLError, AttributeError):
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _driver_cuda(pynvml: Any) -> tuple[int, int] | None:
    try:
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    except pynvml.NVMLError:
        return None
    return version // 1000, version % 1000 // 10
