# SPDX-License-Identifier: Apache-2.0
"""Inkling's mixture of experts: a sigmoid router whose shared experts share the normalisation.

With z = x Wg^T in float32, R routed logits then S shared ones:

    chosen  = the K largest of sigmoid(z_routed) + bias      (the bias only chooses)
    a_j     = sigmoid(z_j) / sum sigmoid(z)                  over the K chosen and all S shared
    weights = a * route_scale * global_scale
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    top_k: int,
    num_shared: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Experts and weights of each token.

    logits: (num_tokens, R + S) float32. bias: (R,). scale: () route_scale * global_scale.
    Returns (num_tokens, K) expert ids, their weights, and the (num_tokens, S) weights of
    the shared experts.
    """
    routed = logits[:, :-num_shared]
    ids = (routed.sigmoid() + bias).topk(top_k, -1).indices
    both = torch.cat([routed.gather(1, ids), logits[:, -num_shared:]], 1)
    log_sigmoid = F.logsigmoid(both)
    weights = (log_sigmoid - log_sigmoid.logsumexp(-1, keepdim=True)).exp() * scale
    return ids, weights[:, :top_k], weights[:, top_k:]
