# SPDX-License-Identifier: Apache-2.0
"""Attention kernels beside the copy rate and FlashAttention 4, on one GPU.

    python benchmarks/kernels/attention.py [--sweep]

Shapes are Inkling's: 64 query heads, 8 KV heads, head_dim 128, bf16; "bias" is the relative
bias with extent 1024. Decode rows tell the share of the measured device-to-device copy rate
that reading K and V reaches; prefill rows TFLOP/s. `--sweep` tries launch configurations.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch

from vllm.attention.ops.arch import KernelConfig
from vllm.attention.ops.reference import paged_attention as reference_attention
from vllm.attention.ops.triton_attention import (
    launch_decode,
    launch_prefill,
    paged_attention,
    workspace_elements,
)

HEADS, KV_HEADS, DIM, EXTENT = 64, 8, 128, 1024
DECODE = ((1, 65536), (8, 32768), (32, 8192), (1, 8192), (128, 2048))
PREFILL = ((1, 4096), (1, 32768), (8, 2048))
Call = Callable[[], object]


def measure_ms(call: Call, repeats: int = 20) -> float:
    """Median device time with the L2 cache flushed before each call."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        flush.zero_()
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


def sweep(rate: float) -> None:
    """Launch configurations, best first, for the rows that have a target."""
    for (batch, length), page in itertools.product(DECODE[:3], (128, 16)):
        case = Case(batch, length, 1, page, True)
        results = []
        for n, warps, stages, per_sm in itertools.product((64, 128), (4, 8), (2, 3, 4), (1, 2, 3)):
            config = KernelConfig(16, n, warps, stages, per_sm)
            elements = 4 * 132 * per_sm * 16 * (DIM + 1)
            work = torch.empty(elements, device="cuda")

            def call(
                config: KernelConfig = config, work: torch.Tensor = work, case: Case = case
            ) -> None:
                a = case.arguments()
                launch_decode(*a[:7], 1, a[9], None, a[11], work, config)

            try:
                ms = measure_ms(call, 7)
            except Exception:
                continue
            results.append((ms, n, warps, stages, per_sm))
        for ms, *config in sorted(results)[:4]:
            share = case.kv_bytes / ms * 1e3 / rate
            print(f"sweep decode {batch} x {length} page {page}: {ms:.3f} ms {share:.1%} {config}")
    for bias in (True, False):
        case = Case(1, 4096, 4096, 128, bias)
        results = []
        for m, n, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3)):
            config = KernelConfig(m, n, warps, stages)

            def call(config: KernelConfig = config, case: Case = case) -> None:
                a = case.arguments()
                launch_prefill(*a[:8], len(case.q), a[9], None, a[11], config)

            try:
                ms = measure_ms(call, 7)
            except Exception:
                continue
            results.append((ms, m, n, warps, stages))
        for ms, *config in sorted(results)[:4]:
            print(
                f"sweep prefill bias={bias}: {ms:.3f} ms "
                f"{case.flops / ms / 1e9:.0f} TFLOP/s {config}"
            )


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
    if options.sweep:
        sweep(rate)


if __name__ == "__main__":
    main()
