# SPDX-License-Identifier: Apache-2.0
"""Drafts from the checkpoint's own head (MTP).

After a step every depth runs over all of the step's rows, so that its cache holds every
position; the last row of a request whose prompt is done gives its draft. Row P of depth d
reads the token at P + 1 + d: known, or drafted by a depth before.

Deeper depths have seen drafts in their last rows, which a rejection leaves in their cache;
that can cost acceptance and never changes the output, which the model itself decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.attention.metadata import ForwardContext
from vllm.worker.input_batch import StepRows

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.worker.model_runner import ModelRunner


def make_drafter(vllm_config: VllmConfig, runner: ModelRunner) -> MTPDrafter | None:
    """The drafter that the configuration asks for."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    assert speculative.num_speculative_tokens is not None
    return MTPDrafter(runner, speculative.num_speculative_tokens)


class MTPDrafter:
    """Proposes `num_tokens` tokens for each request, one a depth."""

    def __init__(self, runner: ModelRunner, num_tokens: int) -> None:
        self.runner = runner
        self.model: Any = runner.model
        self.num_tokens = num_tokens

    def propose(
        self,
        rows: StepRows,
        hidden: torch.Tensor,
        fwd: ForwardContext,
        accepted: dict[int, list[int]],
    ) -> dict[str, list[int]]:
        """Drafts by request id, for the requests that got tokens in this step.

        hidden: (num_tokens, hidden_size) of the backbone. accepted: request's index to its
        new tokens, which the batch holds already.
        """
        owners = [i for i, new in accepted.items() if new[-1] >= 0]
        known = self.runner.batch.num_tokens[rows.rows]
        # The row whose next token is the last known one.
        last = rows.offsets[owners] + known[owners] - 2 - rows.starts[owners]
        device = self.runner.device
        last_rows = torch.from_numpy(last).to(device)
        drafts = torch.zeros(len(rows.requests), self.num_tokens, dtype=torch.int64, device=device)
        owner_index = torch.tensor(owners, dtype=torch.int64, device=device)
        for depth in range(self.num_tokens):
            ids = self._tokens_ahead(rows, known, depth, drafts)
            hidden = self.model.draft(depth, ids, hidden, fwd)
            if owners:
                logits = self.model.compute_logits(hidden[last_rows])
                drafts[owner_index, depth] = logits.argmax(-1)
        proposed = drafts.tolist()
        return {rows.requests[i].request_id: proposed[i] for i in owners}

    def _tokens_ahead(
        self, rows: StepRows, known: np.ndarray, depth: int, drafts: torch.Tensor
    ) -> torch.Tensor:
        """(num_tokens,) the token depth + 1 places after each row."""
        batch = self.runner.batch
        targets = rows.positions + 1 + depth
        beyond = targets - known[rows.request_of]
        columns = np.minimum(targets, batch.token_ids.shape[1] - 1)
        host = batch.token_ids[rows.rows[rows.request_of], columns].astype(np.int64)
        host[beyond >= 0] = 0  # unknown: drafted below, or after a rejected row
        ids = torch.from_numpy(host).to(drafts.device)
        drafted = np.flatnonzero((beyond >= 0) & (beyond < depth))
        if len(drafted):
            places = torch.from_numpy(drafted).to(drafts.device)
            owner = torch.from_numpy(rows.request_of[drafted]).to(drafts.device)
            column = torch.from_numpy(beyond[drafted]).to(drafts.device)
            ids[places] = drafts[owner, column]
        return ids
