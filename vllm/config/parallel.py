# SPDX-License-Identifier: Apache-2.0
"""Over how many devices a model is spread, and whether its sizes allow that."""

from __future__ import annotations

import dataclasses
import importlib.util

from vllm.config.fields import check_values, option, raise_usage
from vllm.config.shape import ModelShape
from vllm.errors import Diagnostic, ExitCode


@dataclasses.dataclass
class ParallelConfig:
    """Parallelism."""

    tensor_parallel_size: int = option(1, minimum=1, aliases=("-tp",))
    """Devices that share each layer."""
    pipeline_parallel_size: int = option(1, minimum=1, aliases=("-pp",))
    """Groups of layers on devices of their own; this engine has only 1."""
    distributed_executor_backend: str | None = option(None, choices=("uni", "mp", "ray"))
    """How ranks are started: uni (one, in the engine's process), mp (a process each), or ray
    (an actor each, on the nodes of a Ray cluster; needs the extra `ray`)."""

    def __post_init__(self) -> None:
        raise_usage(check_values(self))

    @property
    def world_size(self) -> int:
        """Devices in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def check_shape(self, shape: ModelShape, architecture: str) -> list[Diagnostic]:
        """Every rule that the model's sizes break, with the sizes that would do."""
        findings = []
        broken = _broken_rules(shape, self.tensor_parallel_size)
        if broken:
            good = [n for n in range(1, 65) if not _broken_rules(shape, n)]
            findings.append(
                Diagnostic(
                    "tensor-parallel-size",
                    f"{architecture} cannot be divided over {self.tensor_parallel_size} ranks",
                    why="; ".join(broken),
                    where="--tensor-parallel-size",
                    fix=f"--tensor-parallel-size {', '.join(map(str, good[:-1]))} or {good[-1]}"
                    if len(good) > 1
                    else "--tensor-parallel-size 1",
                )
            )
        if self.pipeline_parallel_size > 1:
            findings.append(self._no_pipeline(shape))
        if self.distributed_executor_backend == "uni" and self.world_size > 1:
            findings.append(
                Diagnostic(
                    "executor-backend",
                    f"{self.world_size} ranks cannot run in one process",
                    why="--distributed-executor-backend uni is for one rank",
                    fix="--distributed-executor-backend mp, or leave it out",
                    exit_code=ExitCode.USAGE,
                )
            )
        if self.distributed_executor_backend == "ray" and importlib.util.find_spec("ray") is None:
            findings.append(_no_ray())
        return findings

    @staticmethod
    def fits(shape: ModelShape, ranks: int) -> bool:
        """Whether every layer can be divided over `ranks`."""
        return not _broken_rules(shape, ranks)

    def _no_pipeline(self, shape: ModelShape) -> Diagnostic:
        size = self.pipeline_parallel_size
        too_many = f"; the model has {shape.num_layers} layers" if size > shape.num_layers else ""
        return Diagnostic(
            "pipeline-parallel-size",
            f"pipeline parallelism over {size} groups is not available",
            why=f"this engine divides every layer over all devices{too_many}",
            where="--pipeline-parallel-size",
            fix=f"--tensor-parallel-size {self.world_size} in place of it, if the model's sizes "
            "allow that",
        )


def _broken_rules(shape: ModelShape, ranks: int) -> list[str]:
    rules: list[str] = []

    def must_divide(count: int, what: str) -> None:
        text = f"{count:,} {what} are not a multiple of {ranks}"
        if count % ranks and text not in rules:
            rules.append(text)

    for layer in shape.layers:
        must_divide(layer.num_heads, "attention heads")
        if layer.conv_width:
            # A convolution's state lies with its KV head; copies of a head would diverge.
            must_divide(layer.num_kv_heads, "KV heads")
        elif layer.num_kv_heads % ranks and ranks % layer.num_kv_heads:
            text = f"{layer.num_kv_heads} KV heads neither divide {ranks} nor are divided by it"
            rules += [] if text in rules else [text]
    if any(not layer.is_moe for layer in shape.layers):
        must_divide(shape.intermediate_size, "values of the MLP (intermediate_size)")
    if any(layer.is_moe for layer in shape.layers):
        must_divide(shape.moe_intermediate_size, "values of an expert (moe_intermediate_size)")
    return rules


def _no_ray() -> Diagnostic:
    return Diagnostic(
        "ray-unavailable",
        "--distributed-executor-backend ray needs Ray",
        why="the package ray is not installed",
        fix='pip install "vllm[ray]", or --distributed-executor-backend mp on one machine',
    )
