# SPDX-License-Identifier: Apache-2.0
"""Inkling's attention on NVIDIA GPUs: the one constructor of backbone and draft head."""

from __future__ import annotations

from vllm.layers.context import BuildContext
from vllm.models.inkling.common.attention import RelativeAttention
from vllm.models.inkling.configs import InklingConfig
from vllm.models.inkling.nvidia.ops.fa4_rel_attention import check_inkling_fa4_support


class InklingAttention(RelativeAttention):
    """`RelativeAttention` that refuses a GPU whose kernel cannot run, before anything else."""

    def __init__(
        self, ctx: BuildContext, config: InklingConfig, is_local: bool, layer_name: str
    ) -> None:
        # The front end has checked this already; a model built without it lands here.
        check_inkling_fa4_support(ctx.attention_backend if ctx else None)
        super().__init__(ctx, config, is_local, layer_name)
