# SPDX-License-Identifier: Apache-2.0
"""Decode steps captured as CUDA graphs, one a padded batch size.

A replay costs the host one launch in place of several hundred. Inputs are the runner's
persistent buffers; the rows past the batch are made harmless (length 0, slot -1).
"""

from __future__ import annotations

from typing import Any

import torch

from vllm.attention.metadata import ForwardContext, GroupMetadata
from vllm.logger import init_logger
from vllm.worker.device_input import DeviceInput

logger = init_logger(__name__)


class DecodeGraphs:
    """Captured decode steps, smallest first."""

    def __init__(
        self,
        model: Any,
        inputs: DeviceInput,
        sizes: list[int],
        block_size: int,
        max_model_len: int,
    ) -> None:
        self._inputs = inputs
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._sizes = sizes
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._offsets = torch.arange(
            max(sizes, default=0) + 1, dtype=torch.int32, device=inputs.device
        )
        self._capture(model)

    @torch.inference_mode()
    def _capture(self, model: Any) -> None:
        pool = None
        for size in reversed(self._sizes):  # the largest first: smaller ones reuse its memory
            self._pad(0, size)
            fwd = self._context(size)
            ids = self._inputs.ids.device_tensor[:size]
            for _ in range(2):  # compile and tune what is launched for the first time
                model.compute_logits(model(ids, fwd))
                fwd.derived.clear()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden = model(ids, fwd)
                logits = model.compute_logits(hidden)
            pool = pool or graph.pool()
            self._graphs[size] = (graph, hidden, logits)
        logger.info("Captured decode graphs of %d batch sizes", len(self._graphs))

    def _context(self, size: int) -> ForwardContext:
        inputs = self._inputs
        return ForwardContext(
            positions=inputs.positions.device_tensor[:size],
            query_start_loc=self._offsets[: size + 1],
            seq_lens=inputs.seq_lens.device_tensor[:size],
            num_reqs=size,
            num_tokens=size,
            num_decode_reqs=size,
            max_query_len=1,
            max_seq_len=self._max_model_len,
            groups=[
                GroupMetadata(table.device_tensor[:size], slots.device_tensor[:size])
                for table, slots in zip(inputs.tables, inputs.slots, strict=True)
            ],
            block_size=self._block_size,
        )

    def _pad(self, used: int, size: int) -> None:
        """Rows that no request has: no keys to read, no place to write."""
        if used == size:
            return
        inputs = self._inputs
        inputs.seq_lens.device_tensor[used:size].zero_()
        inputs.positions.device_tensor[used:size].zero_()
        inputs.ids.device_tensor[used:size].zero_()
        for slots, table in zip(inputs.slots, inputs.tables, strict=True):
            slots.device_tensor[used:size].fill_(-1)
            table.device_tensor[used:size].zero_()

    def run(
        self, input_ids: torch.Tensor, fwd: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Hidden states and logits of the batch, whose inputs are in the buffers already.

        None if the batch is larger than every captured size.
        """
        count = len(input_ids)
        size = next((s for s in self._sizes if s >= count), None)
        if size is None:
            return None
        self._pad(count, size)
        graph, hidden, logits = self._graphs[size]
        graph.replay()
        return hidden[:count], logits[:count]
