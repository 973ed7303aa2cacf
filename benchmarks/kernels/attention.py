# SPDX-License-Identifier: Apache-2.0
"""Attention kernels beside the copy rate and FlashAttention 4, on one GPU.

    python benchmarks/kernels/attention.py [--sweep]

Shapes are Inkling's: 64 query heads, 8 KV heads, head_dim 128, bf16; "bias" is the relative
bias with extent 1024. Decode rows tell the share of the measured device-to-device copy rate
that reading K and V reaches; prefill rows TFLOP/s. `--sweep` tries launch configurations.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
from collections.abc import Callable

import torch
from triton.runtime.errors import OutOfResources

from vllm.attention.ops.configs import KernelConfig
from vllm.attention.ops.reference import paged_attention as reference_attention
from vllm.attention.ops.triton_attention import (
    launch_decode,
    launch_prefill,
    paged_attention,
    workspace_elements,
)
from vllm.layers.ops.activation import silu_and_mul
from vllm.layers.ops.norm import rms_norm
from vllm.layers.ops.rotary import rotary_and_cache

HEADS, KV_HEADS, DIM, EXTENT = 64, 8, 128, 1024
DECODE = ((1, 65536), (8, 32768), (32, 8192), (1, 8192), (128, 2048))
PREFILL = ((1, 4096), (1, 32768), (8, 2048))
Call = Callable[[], object]


def measure_ms(call: Call, repeats: int = 20) -> float:
    """Median device time; before each call the L2 cache is filled with clean foreign lines.

    Lines that were written would have to go back to memory while the kernel reads. The
    gigabyte takes long enough for the host to have launched the kernels meanwhile.
    """
    flush = torch.zeros(256 << 20, dtype=torch.int32, device="cuda")
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        flush.amax()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def copy_rate() -> float:
    """Bytes a second of a device-to-device copy, read and written."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / measure_ms(lambda: target.copy_(source)) * 1e3


class Case:
    """A paged batch: every sequence `length` long, the last `queries` tokens of it asked for."""

    def __init__(self, batch: int, length: int, queries: int, page: int, bias: bool) -> None:
        self.batch, self.length, self.queries = batch, length, queries
        pages = -(-length // page)
        shape = (batch * pages + 1, page, KV_HEADS, DIM)
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        self.k = torch.randn(shape, **options)
        self.v = torch.randn(shape, **options)
        self.q = torch.randn(batch * queries, HEADS, DIM, **options)
        self.rel = torch.randn(batch * queries, HEADS, EXTENT, **options) if bias else None
        order = torch.randperm(batch * pages, device="cuda").to(torch.int32) + 1
        self.table = order.view(batch, pages)
        self.lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * queries
        self.out = torch.empty_like(self.q)
        elements = workspace_elements(self.q.device, self.q.dtype, HEADS, KV_HEADS, DIM)
        self.work = torch.empty(elements, device="cuda")

    def arguments(self) -> tuple:  # type: ignore[type-arg]
        """Arguments that every implementation takes in this order."""
        return (
            self.out, self.q, self.k, self.v, self.table, self.lens, self.starts, self.queries,
            self.length, 1 / DIM, None, self.rel,
        )  # fmt: skip

    def triton(self) -> torch.Tensor:
        """The portable kernels."""
        decodes = self.batch if self.queries == 1 else 0
        paged_attention(*self.arguments(), self.work, decodes)
        return self.out

    def fa4(self) -> torch.Tensor:
        """FlashAttention 4."""
        from vllm.models.inkling.nvidia.ops.fa4_rel_attention import fa4_rel_attention

        return fa4_rel_attention(*self.arguments())

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that must be read once."""
        return self.batch * self.length * 2 * KV_HEADS * DIM * 2

    @property
    def flops(self) -> float:
        """Two products over the causal half."""
        keys = self.length - self.queries / 2
        return self.batch * 4 * HEADS * DIM * self.queries * keys


def attempt(call: Call) -> float | None:
    """Milliseconds, or None where the implementation is not there or cannot."""
    try:
        return measure_ms(call)
    except Exception as error:
        print(f"    ({type(error).__name__}: {str(error).splitlines()[0][:120]})")
        return None


def check(case: Case) -> None:
    """Both implementations against the float32 reference."""
    want = torch.empty_like(case.q, dtype=torch.float32)
    arguments = case.arguments()
    reference_attention(want, *(arguments[1:]))
    for name in ("triton", "fa4"):
        try:
            got = getattr(case, name)().float()
        except Exception as error:
            print(f"check {name}: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
            continue
        error = (got - want).abs().max() / want.abs().max()
        print(f"check {name}: relative error {error:.1e}")


def row(name: str, ms: float | None, base: float | None, text: str) -> None:
    """One line of the table."""
    if ms is None:
        print(f"{name:<34} {'-':>9}")
    else:
        ratio = f"{base / ms:6.2f}x FA4" if base else ""
        print(f"{name:<34} {ms:9.3f} ms  {text}  {ratio}")


def run_decode(rate: float) -> None:
    """Decode rows."""
    for (batch, length), page, bias in itertools.product(DECODE, (128, 16), (True, False)):
        case = Case(batch, length, 1, page, bias)
        label = f"decode {batch} x {length:,} page {page}{' bias' if bias else ''}"
        peer = attempt(case.fa4) if page == 128 else None
        if peer:
            share = case.kv_bytes / peer * 1e3 / rate
            row(label + " FA4", peer, None, f"{share:6.1%} of copy")
        ms = attempt(case.triton)
        if ms:
            share = case.kv_bytes / ms * 1e3 / rate
            row(label, ms, peer, f"{share:6.1%} of copy")


def run_prefill() -> None:
    """Prefill rows."""
    for (batch, length), bias in itertools.product(PREFILL, (True, False)):
        case = Case(batch, length, length, 128, bias)
        label = f"prefill {batch} x {length:,}{' bias' if bias else ''}"
        peer = attempt(case.fa4)
        if peer:
            row(label + " FA4", peer, None, f"{case.flops / peer / 1e9:6.0f} TFLOP/s")
        ms = attempt(case.triton)
        if ms:
            row(label, ms, peer, f"{case.flops / ms / 1e9:6.0f} TFLOP/s")


def run_layers(rate: float, num_tokens: int = 8192) -> None:
    """The layers' fused kernels at an 8B model's widths: share of copy, bytes moved once."""
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    x, residual = torch.randn(2, num_tokens, 4096, **options)
    weight, gate_up = torch.ones(4096, **options), torch.randn(num_tokens, 28672, **options)
    heads = torch.randn(num_tokens, 48, DIM, **options)
    k_cache, v_cache = torch.empty(2, num_tokens // 16, 16, 8, DIM, **options)
    positions = torch.arange(num_tokens, device="cuda")
    frequencies = torch.ones(DIM // 2, device="cuda")
    calls = {
        "rms_norm + residual": (lambda: rms_norm(x, weight, 1e-5, residual), 4 * x.nbytes),
        "silu_and_mul": (lambda: silu_and_mul(gate_up), gate_up.nbytes * 3 // 2),
        "rotary + KV write": (
            lambda: rotary_and_cache(
                heads[:, :40],
                heads[:, 40:],
                k_cache,
                v_cache,
                positions,
                positions,
                frequencies,
                1.0,
            ),
            2 * heads.nbytes,
        ),
    }
    for name, (call, num_bytes) in calls.items():
        ms = measure_ms(call)
        row(
            f"{name} {num_tokens:,} tokens", ms, None, f"{num_bytes / ms * 1e3 / rate:6.1%} of copy"
        )


DECODE_CONFIGS = [
    KernelConfig(16, n, warps, stages, per_sm)
    for n, warps, stages in itertools.product((64, 128), (4, 8), (2, 3, 4))
    for per_sm in (1, 2, 3)
]
PREFILL_CONFIGS = [
    KernelConfig(m, n, warps, stages)
    for m, n, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3))
]


def launch(case: Case, config: KernelConfig, work: torch.Tensor | None = None) -> None:
    """One kernel with a configuration of its own."""
    a = case.arguments()
    if case.queries == 1:
        launch_decode(*a[:7], 1, a[9], None, a[11], work, config)
    else:
        launch_prefill(*a[:8], len(case.q), a[9], None, a[11], config)


def compile_one(job: tuple[int, int, bool, KernelConfig]) -> None:
    """Put one kernel into Triton's cache on disk; runs in a process of its own."""
    queries, page, bias, config = job
    # What does not fit is left out again by `fastest`, where it fails at once.
    with contextlib.suppress(Exception):
        launch(Case(1, 2048, queries, page, bias), config)
        torch.cuda.synchronize()


def compile_all(num_processes: int = 12) -> None:
    """Compile what `sweep` runs, on all cores."""
    decodes = [c for c in DECODE_CONFIGS if c.programs_per_sm == 1]  # only sizes the grid
    jobs = [(1, page, True, c) for page in (128, 16) for c in decodes]
    jobs += [(2048, 128, bias, c) for bias in (True, False) for c in PREFILL_CONFIGS]
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        pool.map(compile_one, jobs, chunksize=1)


def fastest(case: Case, configs: list[KernelConfig]) -> list[tuple[float, KernelConfig]]:
    """Milliseconds of each configuration that the GPU takes, best first."""
    results = []
    for config in configs:
        elements = 4 * config.programs_per_sm * config.block_m * (DIM + 1)
        elements *= torch.cuda.get_device_properties(0).multi_processor_count
        work = torch.empty(elements, device="cuda")
        try:
            ms = measure_ms(functools.partial(launch, case, config, work), 7)
        except (RuntimeError, OutOfResources):
            continue
        results.append((ms, config))
    return sorted(results, key=lambda result: result[0])


def describe(config: KernelConfig) -> str:
    """A configuration in a line."""
    return (
        f"{config.block_m}x{config.block_n} warps={config.num_warps} "
        f"stages={config.num_stages} per_sm={config.programs_per_sm}"
    )


def sweep(rate: float) -> None:
    """Launch configurations, best first, for the rows that have a target."""
    compile_all()
    for (batch, length), page in itertools.product(DECODE[:3], (128, 16)):
        case = Case(batch, length, 1, page, True)
        for ms, config in fastest(case, DECODE_CONFIGS)[:4]:
            share = case.kv_bytes / ms * 1e3 / rate
            print(f"sweep decode {batch} x {length} page {page}: {ms:.3f} ms {share:.1%}", end=" ")
            print(describe(config))
    for bias in (True, False):
        case = Case(1, 4096, 4096, 128, bias)
        for ms, config in fastest(case, PREFILL_CONFIGS)[:4]:
            rate_text = f"{ms:.3f} ms {case.flops / ms / 1e9:.0f} TFLOP/s"
            print(f"sweep prefill bias={bias}: {rate_text} {describe(config)}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s")
    check(Case(3, 700, 1, 128, True))
    check(Case(2, 700, 300, 128, True))
    run_decode(rate)
    run_prefill()
    run_layers(rate)
    if options.sweep:
        sweep(rate)


if __name__ == "__main__":
    main()
