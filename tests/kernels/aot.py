# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel configuration in use for chips that are not here; a program of its own.

    python -m tests.kernels.aot [--core] ARCH [ARCH ...]

With --core only one configuration of each kernel. Prints one JSON list: {"arch", "kernel",
"shared"} of each. It cannot run where Triton interprets (TRITON_INTERPRET), since then there
is nothing to compile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm.attention.ops import configs
from vllm.attention.ops import triton_attention as attention
from vllm.attention.ops.triton_decode import combine_kernel, decode_kernel
from vllm.attention.ops.triton_prefill import prefill_kernel
from vllm.attention.ops.triton_tiles import UNALIGNED
from vllm.layers.ops import chips
from vllm.layers.ops.activation import silu_and_mul_kernel
from vllm.layers.ops.cache import reshape_and_cache_kernel
from vllm.layers.ops.linear import matrix_vector_kernel
from vllm.layers.ops.moe import (
    down_vector_kernel,
    gate_up_vector_kernel,
    grouped_matmul_kernel,
    tile_config,
    vector_config,
)
from vllm.layers.ops.norm import rms_norm_kernel
from vllm.layers.ops.rotary import rotary_and_cache_kernel
from vllm.layers.ops.routing import group_kernel, route_softmax_kernel
from vllm.models.inkling.common.ops.routing import route_sigmoid_kernel
from vllm.models.inkling.common.ops.short_conv import short_conv_kernel

_POINTERS = {
    "partial_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "weights_ptr": "*fp32",
    "inv_freq_ptr": "*fp32",
    "table_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "query_start_ptr": "*i32",
    "positions_ptr": "*i64",
    "slots_ptr": "*i64",
    "rows_ptr": "*i32",
    "ids_ptr": "*i32",
    "taps_ptr": "*fp32",
    "scale_ptr": "*fp32",
    "choice_bias_ptr": "*fp32",
    "past_slots_ptr": "*i64",
    "request_of_ptr": "*i64",
    "starts_ptr": "*i64",
    "experts_ptr": "*i32",
}
_FLOATS = ("qk_scale", "eps", "factor", "route_scale")
Job = tuple[str, Any, dict[str, object], int, int]
"""Name, kernel, constexprs, num_warps, num_stages."""


def target(arch: str) -> GPUTarget:
    """Triton's name of a chip."""
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def attention_jobs(arch: str) -> Iterator[Job]:
    """Attention with and without bias and window, by page size and rows a tile."""
    heads = 8
    for page, window, extent in ((16, 0, 0), (16, 0, 1024), (128, 512, 512), (128, 0, 1024)):
        for dim in (64, 128):
            base = {"GROUP": heads, "HEAD_DIM": dim, "WINDOW": window, "BLOCK_D": dim}
            base["BLOCK_B"] = 32
            for queries in (1, 16):
                config = configs.decode_config(arch, queries * heads, dim, 2, page)
                shared = base | {"MIN_TILES": attention.MIN_TILES, "REL_EXTENT": extent}
                shared |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
                shared["DEPENDENT"] = chips.has_dependent_launch(arch)
                tail = (
                    f"page={page} window={window} extent={extent} dim={dim} rows={queries * heads}"
                )
                paged: dict[str, object] = {"PAGE": page}
                options = (config.num_warps, config.num_stages)
                yield f"decode {tail}", decode_kernel, shared | paged, *options
                if page == 16:
                    parts: dict[str, object] = {"BLOCK_S": attention.BLOCK_PARTS}
                    yield f"combine {tail}", combine_kernel, shared | parts, 4, 3
            config = configs.prefill_config(arch, 4096, dim, 2, extent > 0)
            blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
            options = (config.num_warps, config.num_stages)
            tail = f"page={page} window={window} extent={extent} dim={dim}"
            paged["REL_EXTENT"] = extent
            blocks["AHEAD"] = configs.bias_tiles_ahead(arch)
            yield f"prefill {tail}", prefill_kernel, base | blocks | paged, *options


def layer_jobs(arch: str) -> Iterator[Job]:
    """The layers' kernels at the widths of an 8B model."""
    waits: dict[str, object] = {"DEPENDENT": chips.has_dependent_launch(arch)}
    norm = waits | {"SIZE": 4096, "BLOCK": 4096}
    for residual in (False, True):
        yield f"norm residual={residual}", rms_norm_kernel, norm | {"HAS_RESIDUAL": residual}, 8, 3
    yield "silu", silu_and_mul_kernel, waits | {"SIZE": 14336, "BLOCK": 1024}, 4, 3
    for bias in (False, True):
        constants = waits | {"BLOCK_K": 1024, "HAS_BIAS": bias}
        yield f"matrix-vector bias={bias}", matrix_vector_kernel, constants, 4, 3
    yield "cache", reshape_and_cache_kernel, {"HEAD_DIM": 128, "ROW": 1024, "BLOCK": 1024}, 4, 3
    rotary = waits | {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "BLOCK_HEADS": 8}
    halves = {"HALF": 64, "BLOCK_HALF": 64}
    for norms in (False, True):
        constants = rotary | halves | {"HAS_NORMS": norms}
        yield f"rotary norms={norms}", rotary_and_cache_kernel, constants, 2, 3
    yield from expert_jobs(arch, waits)
    yield from inkling_jobs(waits)


def expert_jobs(arch: str, waits: dict[str, object]) -> Iterator[Job]:
    """Routing and experts at the widths of Qwen3-30B-A3B."""
    for renormalize in (False, True):
        routing = {"NUM_EXPERTS": 128, "BLOCK_E": 128, "TOP_K": 8, "BLOCK_K": 8}
        routing |= {"RENORMALIZE": renormalize}
        yield f"route renormalize={renormalize}", route_softmax_kernel, waits | routing, 1, 3
    for block_a, warps in ((512, 4), (4096, 8)):
        grouping = {"NUM_EXPERTS": 128, "BLOCK_E": 256, "BLOCK_M": 16, "BLOCK_A": block_a}
        yield f"group assignments={block_a}", group_kernel, waits | grouping, warps, 3
    for gated, vector_kernel in ((True, gate_up_vector_kernel), (False, down_vector_kernel)):
        config = vector_config(gated)
        vector = waits | {"TOP_K": 8, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
        options = (config.num_warps, config.num_stages)
        yield f"experts vectors gated={gated}", vector_kernel, vector, *options
        for block_m in (16, 32, 64, 128):
            config = tile_config(arch, block_m, 2, gated)
            blocks = {"BLOCK_M": block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
            sizes = {"N": 768, "K": 2048, "TOP_K": 8, "GATED": gated}
            options = (config.num_warps, config.num_stages)
            tail = f"rows={block_m} gated={gated}"
            yield f"experts {tail}", grouped_matmul_kernel, waits | sizes | blocks, *options


def inkling_jobs(waits: dict[str, object]) -> Iterator[Job]:
    """What Inkling has beside attention and experts."""
    for decode, block_t, block_c, warps in ((True, 1, 512, 2), (False, 16, 128, 4)):
        conv = waits | {"C": 6144, "TAPS": 4, "BLOCK_T": block_t, "BLOCK_C": block_c}
        conv["DECODE"] = decode
        yield f"short conv decode={decode}", short_conv_kernel, conv, warps, 3
    routing: dict[str, object] = {"NUM_EXPERTS": 256, "NUM_SHARED": 2, "TOP_K": 6}
    routing |= {"BLOCK_E": 256, "BLOCK_K": 8}
    yield "route sigmoid", route_sigmoid_kernel, waits | routing, 1, 3


def compile_job(arch: str, job: Job) -> dict[str, object]:
    """Compile one kernel as the launcher does for 16-byte-aligned tensors."""
    name, kernel, constexprs, num_warps, num_stages = job
    signature, attributes = {}, {}
    for index, parameter in enumerate(kernel.params):
        key = parameter.name
        if parameter.is_constexpr:
            signature[key] = "constexpr"
            continue
        if key.endswith("_ptr"):
            signature[key] = _POINTERS.get(key, "*bf16")
        else:
            signature[key] = "fp32" if key in _FLOATS else "i32"
        if (key.endswith("_ptr") or "stride" in key) and key not in UNALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=target(arch), options=options)
    return {"arch": arch, "kernel": name, "shared": compiled.metadata.shared}


def jobs_of(arch: str, core: bool) -> list[Job]:
    """All jobs of a chip; with `core` the last one of each kernel, which is the largest."""
    jobs = [*attention_jobs(arch), *layer_jobs(arch)]
    return list({job[1]: job for job in jobs}.values()) if core else jobs


if __name__ == "__main__":
    only_core = sys.argv[1] == "--core"
    records = [
        compile_job(chip, job)
        for chip in sys.argv[1 + only_core :]
        for job in jobs_of(chip, only_core)
    ]
    json.dump(records, sys.stdout)
