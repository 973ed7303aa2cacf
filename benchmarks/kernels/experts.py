# SPDX-License-Identifier: Apache-2.0
"""The experts' kernels beside the bytes that they must read, on one GPU.

    python benchmarks/kernels/experts.py [--sweep]

Shapes are Qwen3-30B-A3B's: 128 experts of 2,048 x 768, 8 a token, bf16. Several layers of
weights are run after one another in one CUDA graph, so that none is found in the L2 cache and
launches overlap as in a model. Shares are of the measured device-to-device copy rate.
`--sweep` tries launch configurations.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from attention import copy_rate
from triton.runtime.errors import OutOfResources

from vllm.layers.ops import moe, routing

EXPERTS, TOP_K, HIDDEN, INNER, LAYERS = 128, 8, 2048, 768, 6
TOKENS = (1, 2, 4, 8, 16, 64, 256, 2048, 8192)
Layer = Callable[[int], object]
"""Runs one layer, by its number."""


class Case:
    """Random tokens and their experts, for every layer."""

    def __init__(self, tokens: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        self.tokens, self.w13, self.w2 = tokens, w13, w2
        self.x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        logits = torch.randn(LAYERS, tokens, EXPERTS, dtype=torch.bfloat16, device="cuda")
        routed = [routing.route_softmax(row, TOP_K, True) for row in logits]
        self.logits = logits
        self.weights = [weights for weights, _ in routed]
        self.ids = [ids for _, ids in routed]
        self.inner = torch.randn(tokens * TOP_K, INNER, dtype=torch.bfloat16, device="cuda")
        self.rows = moe.tile_rows(tokens * TOP_K, EXPERTS)
        self.used = sum(len(ids.unique()) for ids in self.ids) / LAYERS

    def groupings(self, rows: int) -> list[routing.Grouping]:
        """Tiles of `rows` assignments, for every layer."""
        return [routing.group_by_expert(ids, EXPERTS, rows) for ids in self.ids]

    @property
    def matrix_bytes(self) -> float:
        """Bytes of one of an expert's three matrices, over the experts that a layer uses."""
        return self.used * INNER * HIDDEN * 2

    @property
    def flops(self) -> float:
        """Operations of one of the three products."""
        return 2 * self.tokens * TOP_K * INNER * HIDDEN


def layer_us(layer: Layer) -> float | None:
    """Microseconds a layer, median of graph replays; None if it does not fit the chip."""
    try:
        for index in range(LAYERS):
            layer(index)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(LAYERS):
                layer(index)
    except OutOfResources:
        return None
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2] / LAYERS * 1e3


def report(case: Case, rate: float) -> str:
    """One line: each kernel, and all of a layer with the shares of the two limits."""
    parts = {
        "route": lambda i: routing.route_softmax(case.logits[i], TOP_K, True),
        "group": lambda i: routing.group_by_expert(case.ids[i], EXPERTS, case.rows),
        "experts": lambda i: moe.fused_experts(
            case.x, case.w13[i], case.w2[i], case.weights[i], case.ids[i]
        ),
    }
    times = {name: layer_us(layer) or 0.0 for name, layer in parts.items()}
    seconds = times["experts"] / 1e6
    shares = f"{3 * case.matrix_bytes / seconds / rate:5.0%} of copy"
    shares += f"{3 * case.flops / seconds / 1e12:7.1f} TFLOP/s"
    figures = "".join(f"{name} {us:8.1f} us  " for name, us in times.items())
    return f"{case.tokens:5d} tokens, {case.used:5.1f} experts: {figures}{shares}"


def sweep(case: Case, rate: float) -> None:
    """The fastest configurations of each product."""
    count = case.tokens * TOP_K

    def tiled(gated: bool, rows: int, *numbers: int) -> Layer:
        groupings, config = case.groupings(rows), moe.ProductConfig(*numbers)
        if gated:
            return lambda i: moe.grouped_matmul(
                case.x, case.w13[i], groupings[i], TOP_K, count, None, config
            )
        return lambda i: moe.grouped_matmul(
            case.inner, case.w2[i], groupings[i], TOP_K, count, case.weights[i], config
        )

    def vectors(gated: bool, *numbers: int) -> Layer:
        config = moe.ProductConfig(*numbers)
        if gated:
            return lambda i: moe.gate_up_vectors(case.x, case.w13[i], case.ids[i], config)
        return lambda i: moe.down_vectors(
            case.inner, case.w2[i], case.weights[i], case.ids[i], config
        )

    if case.rows >= 64:
        choices = [(tiled, c) for c in itertools.product(
            (case.rows // 2, case.rows), (64, 128), (64,), (4, 8), (3, 4))]  # fmt: skip
    else:
        choices = [(tiled, c) for c in itertools.product(
            (case.rows, 2 * case.rows), (32, 64), (64, 128), (4,), (3, 4))]  # fmt: skip
    if case.tokens <= 8:
        blocks = itertools.product((1, 2, 4, 8), (256, 512, 1024), (1, 2, 4))
        choices = [(vectors, c) for c in blocks]
    for gated in (True, False):
        found = []
        for make, numbers in choices:
            time = layer_us(make(gated, *numbers))
            if time is not None:
                found.append((time, make.__name__, numbers))
        size = case.matrix_bytes * (2 if gated else 1)
        for time, name, numbers in sorted(found)[:5]:
            share = size / time * 1e6 / rate
            print(f"    {'gate-up' if gated else 'down':8} {name:8} {numbers} "
                  f"{time:8.1f} us {share:5.0%}")  # fmt: skip


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_rate()
    print(f"copy {rate / 1e12:.2f} TB/s")
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    w13 = torch.randn(LAYERS, EXPERTS, 2 * INNER, HIDDEN, **options).div_(HIDDEN**0.5)
    w2 = torch.randn(LAYERS, EXPERTS, HIDDEN, INNER, **options).div_(INNER**0.5)
    for tokens in arguments.tokens:
        case = Case(tokens, w13, w2)
        print(report(case, rate), flush=True)
        if arguments.sweep:
            sweep(case, rate)


if __name__ == "__main__":
    main()
