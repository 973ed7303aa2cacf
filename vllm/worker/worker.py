# SPDX-License-Identifier: Apache-2.0
"""One rank: its device, model, cache and runner."""

from __future__ import annotations

import math
import mmap
import os
from typing import TYPE_CHECKING, Any

import torch

from vllm import envs
from vllm.attention.metadata import ForwardContext, GroupMetadata
from vllm.config.kv_cache import KVCacheConfig
from vllm.config.kv_plan import full_sequence_bytes, groups_of
from vllm.distributed.parallel_state import TensorParallelGroup
from vllm.engine.messages import SchedulerOutput
from vllm.errors import Diagnostic, ExitCode, UnsupportedHardwareError
from vllm.layers.context import BuildContext
from vllm.loader import load_model
from vllm.logger import init_logger
from vllm.platforms import host
from vllm.platforms.cpu import CpuPlatform
from vllm.worker.model_runner import ModelRunner, StepResult

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

logger = init_logger(__name__)

_RESERVE = 256 << 20
"""Bytes of a GPU that stay free for what the profile cannot see (CUDA graphs, NCCL)."""


class Worker:
    """Loads the model on one device and runs steps on it.

    The device is number `device_index` of those that this process sees; without it, the
    process sees all of them and ranks take them in order.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        rank: int = 0,
        address: str = "",
        device_index: int | None = None,
    ) -> None:
        self.config = vllm_config
        world_size = vllm_config.parallel_config.world_size
        index = rank if device_index is None else device_index
        if vllm_config.device_config.kind == "cpu":
            _take_cores(rank, world_size)
        self.device = _open_device(vllm_config, index)
        self.tp = TensorParallelGroup.join(rank, world_size, address, self.device)
        model_config = vllm_config.model_config
        # All ranks draw the same noise, so that all sample the same token.
        torch.manual_seed(model_config.seed)
        speculative = vllm_config.speculative_config
        num_drafts = (speculative.num_speculative_tokens or 0) if speculative else 0
        self.ctx = BuildContext(
            model_config.hf_config,
            getattr(torch, model_config.resolved_dtype),
            self.device,
            self.tp,
            vllm_config.attention_config.resolved_backend,
            groups_of(vllm_config),
            vllm_config.attention_config.backend,
            num_drafts,
        )
        self._memory_before = self._memory_used()
        self.model: Any = load_model(vllm_config, self.ctx)
        self.runner: ModelRunner | None = None

    def _memory_used(self) -> int:
        if self.device.type == "cpu":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def kv_cache_memory_bytes(self) -> int:
        """What the KV cache may take on this rank; equal on all of them."""
        cache = self.config.cache_config
        if self.device.type != "cpu":
            self._warm_up()
        if cache.kv_cache_memory_bytes is not None:
            own = cache.kv_cache_memory_bytes
        elif self.device.type == "cpu":
            ranks = self.tp.world_size
            sequence = full_sequence_bytes(self.config) * ranks
            own = CpuPlatform.kv_cache_bytes(host.memory_available(), sequence) // ranks
        else:
            own = self._profile()
        return self.tp.minimum(own)

    def _warm_up(self) -> None:
        """Prompts of several sizes: kernels differ by size, and none of them should be compiled
        while requests wait."""
        budget = self.config.scheduler_config.max_num_batched_tokens or 1
        for tokens in sorted({max(1, budget // 16), max(1, budget // 4), budget}):
            self._dummy_step(tokens)

    def _profile(self) -> int:
        """Memory left of the utilization share after a step of the largest size."""
        torch.cuda.reset_peak_memory_stats(self.device)
        base = torch.cuda.memory_allocated(self.device)
        self._dummy_step(self.config.scheduler_config.max_num_batched_tokens or 1)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - base
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        budget = int(total * self.config.cache_config.gpu_memory_utilization)
        left = budget - (total - free) - peak - _RESERVE
        logger.info(
            "GPU memory: weights %.2f GiB, peak of a step %.2f GiB, %.2f GiB for the KV cache",
            base / 2**30, peak / 2**30, left / 2**30,
        )  # fmt: skip
        return left

    @torch.inference_mode()
    def _dummy_step(self, tokens: int) -> None:
        """A prompt of `tokens` over a cache of two blocks, and logits of every sequence."""
        scheduler = self.config.scheduler_config
        length = self.config.model_config.max_model_len or tokens
        # Several prompts where one cannot be that long.
        count = -(-tokens // length)
        size = -(-tokens // count)
        block_size = self.config.block_size
        caches = self._allocate(
            KVCacheConfig(block_size, self.ctx.groups, tuple(2 for _ in self.ctx.groups))
        )
        self._bind(caches)
        options: dict[str, Any] = {"device": self.device, "dtype": torch.int32}
        width = -(-size // block_size)
        total = size * count
        fwd = ForwardContext(
            positions=torch.arange(size, device=self.device).repeat(count),
            query_start_loc=torch.arange(0, total + 1, size, **options),
            seq_lens=torch.full((count,), size, **options),
            num_reqs=count,
            num_tokens=total,
            num_decode_reqs=0,
            max_query_len=size,
            max_seq_len=size,
            groups=[
                GroupMetadata(
                    torch.zeros((count, width), **options),
                    torch.full((total,), -1, device=self.device),
                )
                for _ in self.ctx.groups
            ],
            block_size=block_size,
            query_start_loc_cpu=torch.arange(0, total + 1, size, dtype=torch.int32),
            seq_lens_cpu=torch.full((count,), size, dtype=torch.int32),
        )
        hidden = self.model(torch.zeros(total, dtype=torch.int64, device=self.device), fwd)
        logits = self.model.compute_logits(hidden[: scheduler.max_num_seqs])
        logits.float().softmax(-1)

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        """Allocate the cache and make the runner."""
        self._bind(self._allocate(kv_config))
        self.runner = ModelRunner(self.config, self.model, self.device, kv_config)

    def _allocate(self, kv_config: KVCacheConfig) -> dict[str, tuple[torch.Tensor, ...]]:
        caches: dict[str, tuple[torch.Tensor, ...]] = {}
        for group, num_blocks in zip(kv_config.groups, kv_config.num_blocks, strict=True):
            rows = group.rows_per_block or kv_config.block_size
            for layer in group.layers:
                if group.kind == "conv":
                    shape: tuple[int, ...] = (num_blocks, rows, layer.conv_width)
                    caches[layer.name] = (self._zeros(shape),)
                else:
                    shape = (num_blocks, rows, layer.num_kv_heads, layer.head_dim)
                    caches[layer.name] = (self._zeros(shape), self._zeros(shape))
        return caches

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A zeroed tensor; on the CPU its pages are taken when they are first written.

        torch.zeros would write all of them, which takes seconds for some GiB.
        """
        dtype = self.ctx.dtype
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
        return torch.frombuffer(pages, dtype=dtype).view(shape)

    def _bind(self, caches: dict[str, tuple[torch.Tensor, ...]]) -> None:
        for module in self.model.modules():
            bind = getattr(module, "bind_kv_cache", None)
            if bind is not None:
                bind(caches)

    def warm_up(self) -> None:
        """Run every kernel that a request can reach, and capture the decode graphs."""
        assert self.runner is not None
        from vllm.worker.warm_up import warm_up

        warm_up(self.runner, self.config)

    def execute_model(self, step: SchedulerOutput) -> StepResult:
        """Launch a step."""
        assert self.runner is not None
        return self.runner.execute(step)


def _take_cores(rank: int, world_size: int) -> None:
    """Threads of this rank: on the cores that are named for it, else an equal share."""
    bound = envs.VLLM_CPU_OMP_THREADS_BIND
    if bound is not None:
        os.sched_setaffinity(0, bound[rank])
        torch.set_num_threads(len(bound[rank]))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, host.num_cores() // world_size))


def _open_device(vllm_config: VllmConfig, index: int) -> torch.device:
    if vllm_config.device_config.kind == "cpu":
        return torch.device("cpu")
    # CUDA must count devices as the front end did.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if not torch.cuda.is_available():
        raise UnsupportedHardwareError(
            Diagnostic(
                "torch-without-cuda",
                "torch finds no GPU",
                why=f"torch {torch.__version__} is built for CUDA {torch.version.cuda}",
                fix="install a torch that fits the driver, or --device cpu",
                exit_code=ExitCode.HARDWARE,
            )
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
