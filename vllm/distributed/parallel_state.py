# SPDX-License-Identifier: Apache-2.0
"""The ranks that share each layer, and what they exchange: NCCL on GPUs, Gloo on the CPU."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

_JOIN_TIMEOUT = datetime.timedelta(minutes=5)


class TensorParallelGroup:
    """This process's place among the tensor-parallel ranks; with one rank nothing is sent."""

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.group = group

    @classmethod
    def single(cls) -> TensorParallelGroup:
        """One rank alone."""
        return cls(0, 1)

    @classmethod
    def join(
        cls, rank: int, world_size: int, address: str, device: torch.device
    ) -> TensorParallelGroup:
        """Meet the others at `address` (tcp://host:port); `RuntimeError` after 5 minutes."""
        if world_size == 1:
            return cls.single()
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=address,
            rank=rank,
            world_size=world_size,
            timeout=_JOIN_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        return cls(rank, world_size, dist.group.WORLD)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if self.world_size > 1:
            tensor = tensor.contiguous()
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Every rank's tensor, joined along `dim` in the order of ranks."""
        if self.world_size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def minimum(self, value: int) -> int:
        """The least of all ranks' values."""
        if self.world_size == 1:
            return value
        values: list[int] = [0] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return min(values)

    def leave(self) -> None:
        """Part from the other ranks."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()
