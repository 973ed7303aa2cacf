# SPDX-License-Identifier: Apache-2.0
"""A step's inputs on the device: persistent buffers, filled from pinned host memory.

On the CPU host and device are one and the arrays are used as they are.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

_RING = 3
"""Host buffers in turn, so that a copy on its way is not overwritten by the next step."""
_NUM_INDEXES = 4


@dataclasses.dataclass
class StepTensors:
    """Views of the buffers, cut to the step's size."""

    ids: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor
    seq_lens: torch.Tensor
    slots: list[torch.Tensor]
    tables: list[torch.Tensor]


class _Buffer:
    """One device tensor and its pinned host copies."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device_tensor = torch.zeros(shape, dtype=dtype, device=device)
        pinned = [torch.zeros(shape, dtype=dtype, pin_memory=True) for _ in range(_RING)]
        self.hosts = [(t, t.numpy()) for t in pinned]
        self.turn = 0

    def put(self, values: np.ndarray) -> torch.Tensor:
        self.turn = (self.turn + 1) % _RING
        tensor, array = self.hosts[self.turn]
        if values.ndim == 1:
            count = len(values)
            array[:count] = values
            return self.device_tensor[:count].copy_(tensor[:count], non_blocking=True)
        rows, columns = values.shape
        array[:rows, :columns] = values
        # Whole rows: one contiguous copy; what lies beyond the columns is stale and unread.
        self.device_tensor[:rows].copy_(tensor[:rows], non_blocking=True)
        return self.device_tensor[:rows]


class DeviceInput:
    """Buffers for up to `max_tokens` tokens of `max_reqs` requests."""

    def __init__(
        self, device: torch.device, max_tokens: int, max_reqs: int, table_widths: list[int]
    ) -> None:
        self.device = device
        if device.type == "cpu":
            return

        def make(dtype: torch.dtype, *shape: int) -> _Buffer:
            return _Buffer(shape, dtype, device)

        self.ids = make(torch.int64, max_tokens)
        self.positions = make(torch.int64, max_tokens)
        self.offsets = make(torch.int32, max_reqs + 1)
        self.seq_lens = make(torch.int32, max_reqs)
        self.slots = [make(torch.int64, max_tokens) for _ in table_widths]
        self.tables = [make(torch.int32, max_reqs, width) for width in table_widths]
        self._indexes = [make(torch.int64, max_tokens) for _ in range(_NUM_INDEXES)]
        self._results = [
            torch.zeros(max_tokens, dtype=torch.int64, pin_memory=True) for _ in range(_RING)
        ]
        self._result_turn = 0

    def upload(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        offsets: np.ndarray,
        seq_lens: np.ndarray,
        slots: list[np.ndarray],
        tables: list[np.ndarray],
    ) -> StepTensors:
        """Copy a step's arrays to the device without waiting."""
        if self.device.type == "cpu":
            return StepTensors(
                torch.from_numpy(ids.astype(np.int64)),
                torch.from_numpy(positions),
                torch.from_numpy(offsets.astype(np.int32)),
                torch.from_numpy(seq_lens.astype(np.int32)),
                [torch.from_numpy(s) for s in slots],
                [torch.from_numpy(np.ascontiguousarray(t)) for t in tables],
            )
        return StepTensors(
            self.ids.put(np.maximum(ids, 0)),
            self.positions.put(positions),
            self.offsets.put(offsets),
            self.seq_lens.put(seq_lens),
            [b.put(s) for b, s in zip(self.slots, slots, strict=True)],
            [b.put(t) for b, t in zip(self.tables, tables, strict=True)],
        )

    def index(self, values: np.ndarray, purpose: int = 0) -> torch.Tensor:
        """Indices on the device; each purpose (0 to 3) has a buffer of its own."""
        if self.device.type == "cpu":
            return torch.from_numpy(values)
        return self._indexes[purpose].put(values)

    def copy_back(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """The tokens on the host once the event has happened (None: they are there)."""
        if self.device.type == "cpu":
            return tokens, None
        self._result_turn = (self._result_turn + 1) % _RING
        target = self._results[self._result_turn][: len(tokens)]
        target.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return target, event
