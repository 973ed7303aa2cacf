# SPDX-License-Identifier: Apache-2.0
"""Checkpoint tensors into modules: renamed, de-interleaved, NVFP4 decoded.

Names go through `layout.canonical_name`, so that what preflight expects is what is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from vllm.layers.moe import DOWN, GATE, UP, FusedMoE
from vllm.models.inkling.layout import NVFP4_GROUP, CanonicalName, canonical_name

# Canonical inner name -> (module path within the layer, part)
_LAYER_MODULES: dict[str, tuple[str, int | None]] = {
    "attn_norm.weight": ("attn_norm", None),
    "mlp_norm.weight": ("mlp_norm", None),
    "attn.wq_du.weight": ("attn.qkvr", 0),
    "attn.wk_dv.weight": ("attn.qkvr", 1),
    "attn.wv_dv.weight": ("attn.qkvr", 2),
    "attn.wr_du.weight": ("attn.qkvr", 3),
    "attn.wo_ud.weight": ("attn.out", None),
    "attn.q_norm.weight": ("attn.q_norm", None),
    "attn.k_norm.weight": ("attn.k_norm", None),
    "attn.k_sconv.weight": ("attn.kv_conv", 0),
    "attn.v_sconv.weight": ("attn.kv_conv", 1),
    "attn_sconv.weight": ("attn_conv", None),
    "mlp_sconv.weight": ("mlp_conv", None),
    "mlp.w2_md.weight": ("mlp.down", None),
}
# Canonical inner name -> parameter, where there is nothing to shard
_PLAIN = {
    "attn.rel_logits_proj.proj": "attn.rel_proj",
    "mlp.global_scale": "mlp.global_scale",
    "mlp.gate.weight": "mlp.gate",
    "mlp.gate.bias": "mlp.gate_bias",
    "mlp.gate.global_scale": "mlp.global_scale",
}
_DENSE_W13 = "mlp.w13_dn.weight"
_EXPERTS = ("mlp.experts.w13_weight", "mlp.experts.w2_weight")
_SHARED_EXPERTS = (
    "mlp.shared_experts.shared_w13_weight",
    "mlp.shared_experts.shared_w2_weight",
)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def load_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Give the model's parameters their values; returns the names of those that got one.

    Modules that the model lacks (towers; the draft head where it is not asked for) are skipped.
    """
    loader = _Loader(model)
    for name, tensor in weights:
        target = canonical_name(name)
        if target is not None:
            loader.load(target, tensor)
    return loader.loaded


class _Loader:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters())
        self.packed: dict[str, dict[str, torch.Tensor]] = {}
        self.loaded: set[str] = set()

    def load(self, target: CanonicalName, tensor: torch.Tensor) -> None:
        layer, inner = _split_layer(target.name)
        if layer is None:
            self._into_module(target.name.removesuffix(".weight"), tensor, None)
        elif layer not in self.modules:
            return
        elif inner.startswith(_EXPERTS):
            self._experts(f"{layer}.", inner, tensor, target)
        elif inner in _SHARED_EXPERTS:
            experts = self.modules[f"{layer}.mlp.experts"]
            assert isinstance(experts, FusedMoE)
            self._stack(experts, inner == _SHARED_EXPERTS[1], tensor, -len(tensor), target)
        elif inner == _DENSE_W13:
            for part, half in _halves(tensor, target):
                self._into_module(f"{layer}.mlp.gate_up", half, part)
        elif inner in _PLAIN:
            name = f"{layer}.{_PLAIN[inner]}"
            self.parameters[name].copy_(tensor)
            self.loaded.add(name)
        else:
            path, column = _LAYER_MODULES[inner]
            self._into_module(f"{layer}.{path}", tensor, column)

    def _into_module(self, path: str, tensor: torch.Tensor, part: int | None) -> None:
        module: Any = self.modules.get(path)
        if module is None:
            return
        module.load("weight", tensor, part)
        self.loaded.add(f"{path}.weight")

    def _experts(
        self, prefix: str, inner: str, tensor: torch.Tensor, target: CanonicalName
    ) -> None:
        """Stacks of experts, plain or as NVFP4 whose scales come as tensors of their own."""
        base = next(n for n in _EXPERTS if inner.startswith(n))
        field = inner.removeprefix(base).lstrip(".")
        if field in ("input_amax", "original_shape"):
            return
        experts = self.modules[f"{prefix}mlp.experts"]
        assert isinstance(experts, FusedMoE)
        is_down = base == _EXPERTS[1]
        if not field and tensor.dtype != torch.uint8:
            self._stack(experts, is_down, tensor, 0, target)
        else:
            parts = self.packed.setdefault(prefix + base, {})
            parts[field] = tensor
            if len(parts) < 3:
                return
            del self.packed[prefix + base]
            for index in range(len(parts[""])):
                matrix = decode_nvfp4(*(parts[f][index] for f in ("", "scale", "scale2")))
                self._expert(experts, is_down, index, matrix, target)
        self.loaded.add(f"{prefix}mlp.experts.{'w2' if is_down else 'w13'}")

    def _stack(
        self,
        experts: FusedMoE,
        is_down: bool,
        tensor: torch.Tensor,
        first: int,
        target: CanonicalName,
    ) -> None:
        """(count, rows, columns) to the experts from `first` on; a negative one counts from the
        end, where the shared ones are."""
        for index, matrix in enumerate(tensor, first % experts.num_experts):
            self._expert(experts, is_down, index, matrix, target)

    def _expert(
        self,
        experts: FusedMoE,
        is_down: bool,
        index: int,
        matrix: torch.Tensor,
        target: CanonicalName,
    ) -> None:
        if is_down:
            experts.load("weight", matrix, DOWN, index)
            return
        for part, half in _halves(matrix, target):
            experts.load("weight", half, (GATE, UP)[part], index)


def _split_layer(name: str) -> tuple[str | None, str]:
    """("layers.3", "attn_norm.weight"), or (None, name) for what is not in a layer."""
    before, found, inner = name.partition("transformer_block.")
    if found:
        return before + found.rstrip("."), inner
    if not name.startswith("layers."):
        return None, name
    _, index, inner = name.split(".", 2)
    return f"layers.{index}", inner


def _halves(tensor: torch.Tensor, target: CanonicalName) -> list[tuple[int, torch.Tensor]]:
    """(0, gate) and (1, up) of a matrix, or of a stack of matrices, that holds both."""
    if target.half is not None:
        return [(target.half, tensor)]
    if target.interleaved:
        return [(0, tensor[..., 0::2, :]), (1, tensor[..., 1::2, :])]
    gate, up = tensor.chunk(2, -2)
    return [(0, gate), (1, up)]


def decode_nvfp4(packed: torch.Tensor, scale: torch.Tensor, scale2: torch.Tensor) -> torch.Tensor:
    """One matrix of NVFP4 values as float32.

    packed: (rows, K/2) uint8, the low nibble holding the even column. scale: (rows, K/16)
    float8_e4m3fn. scale2: () float32. value = E2M1(nibble) * scale * scale2.
    """
    table = torch.tensor(_E2M1, device=packed.device)
    table = torch.cat([table, -table])
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    factors = scale.float() * scale2
    grouped = table[nibbles.long()].unflatten(-1, (-1, NVFP4_GROUP))
    return (grouped * factors[..., None]).flatten(-2)
