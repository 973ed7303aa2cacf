# SPDX-License-Identifier: Apache-2.0
"""CUDA_VISIBLE_DEVICES read as the CUDA driver reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ORDINAL = re.compile(r"[+-]?\d+")
_MAX_DIGITS = 10
"""Longer numbers name no device, and int() refuses thousands of digits."""


def parse_visible_devices(value: str | None) -> list[int] | list[str] | None:
    """Ordinals or UUIDs in order; None if the variable is unset and every device is visible.

    The first entry decides between UUIDs (GPU-, MIG-) and ordinals. The list ends at the
    first entry that is of another kind, negative or no number ("1gpu" counts as 1); an entry
    that is named twice makes every device invisible.
    """
    if value is None:
        return None
    for prefix in ("GPU-", "MIG-"):
        if value.strip().startswith(prefix):
            return _until_invalid([_with_prefix(e, prefix) for e in value.split(",")])
    return _until_invalid([_ordinal(e) for e in value.split(",")])


def _until_invalid(entries: list) -> list:  # type: ignore[type-arg]
    valid: list = []  # type: ignore[type-arg]
    for entry in entries:
        if entry is None:
            break
        if entry in valid:
            return []
        valid.append(entry)
    return valid


def _with_prefix(entry: str, prefix: str) -> str | None:
    return entry.strip() if entry.strip().startswith(prefix) else None


def _ordinal(entry: str) -> int | None:
    match = _ORDINAL.match(entry.strip())
    if match is None or len(match.group()) > _MAX_DIGITS:
        return None
    number = int(match.group())
    return number if number >= 0 else None


def select_uuids(wanted: Sequence[str], uuids: Sequence[str]) -> list[int]:
    """Indices of the devices that unique UUID prefixes name; ends at the first that does not."""
    indices: list[int] = []
    for prefix in wanted:
        matches = [i for i, uuid in enumerate(uuids) if uuid.startswith(prefix)]
        if len(matches) != 1:
            break
        if matches[0] in indices:
            return []
        indices.append(matches[0])
    return indices


def select_ordinals(wanted: Sequence[int], count: int) -> list[int]:
    """The ordinals up to the first that names no device."""
    indices = []
    for ordinal in wanted:
        if ordinal >= count:
            break
        indices.append(ordinal)
    return indices
