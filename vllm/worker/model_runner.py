# SPDX-License-Identifier: Apache-2.0
"""One step on the device: inputs from the batch's arrays, forward, sampling, the result.

Tokens stay on the device between steps: the last token of each row is kept there, so the
next step can be launched before the host has seen it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.attention.metadata import ForwardContext, GroupMetadata
from vllm.config.kv_cache import KVCacheConfig
from vllm.engine.messages import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from vllm.sampling.metadata import SamplingMetadata, make_metadata
from vllm.sampling.sampler import History, SamplerOutput, gather_logprobs, sample
from vllm.worker.device_input import DeviceInput
from vllm.worker.drafter import make_drafter
from vllm.worker.input_batch import InputBatch, StepRows

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.worker.cuda_graph import DecodeGraphs

_NOT_A_NUMBER = "the model's logits are not numbers (NaN or infinite)"
_ON_ITS_WAY = -1
"""Host's stand-in for a token that only the device knows yet."""


class ModelRunner:
    """Runs the model over the batch that the scheduler describes."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: Any,
        device: torch.device,
        kv_config: KVCacheConfig,
    ) -> None:
        self.model = model
        self.device = device
        self.kv_config = kv_config
        shape = vllm_config.model_config.shape
        self.vocab_size = shape.sampled_vocab_size
        scheduler = vllm_config.scheduler_config
        assert scheduler.max_num_batched_tokens and vllm_config.model_config.max_model_len
        self.batch = InputBatch(
            kv_config, scheduler.max_num_seqs, vllm_config.model_config.max_model_len
        )
        self.inputs = DeviceInput(
            device,
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            [t.shape[1] for t in self.batch.block_tables],
        )
        self.last_tokens = torch.zeros(scheduler.max_num_seqs, dtype=torch.int64, device=device)
        self.graphs: DecodeGraphs | None = None
        self.drafter = make_drafter(vllm_config, self)
        self._metadata: tuple[Any, SamplingMetadata] | None = None
        self._pending: StepResult | None = None

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepResult:
        """Launch a step."""
        self.batch.update(step)
        rows = self.batch.step_rows(step)
        sampled = self._sampled_rows(step, rows)
        metadata = self._sampling_metadata(rows, sampled)
        on_host = self.device.type == "cpu" or metadata.needs_history or step.grammar_bitmask
        if self._pending is not None and on_host:
            self._pending.settle()  # this step depends on tokens on their way
        input_ids, fwd = self._prepare(rows)
        hidden, logits = self._forward(input_ids, fwd, rows, sampled)
        prompt_logprobs = self._prompt_logprobs(rows, hidden)
        output = self._sample(step, rows, sampled, metadata, logits)
        result = StepResult(self, rows, sampled, output, prompt_logprobs)
        if self.drafter is not None:
            result.settle()  # drafts follow the tokens that were accepted
            result.drafts = self.drafter.propose(rows, hidden, fwd, result.accepted)
        self._pending = result
        return result

    def _sampled_rows(self, step: SchedulerOutput, rows: StepRows) -> SampledRows:
        """The requests whose last known token is computed, a row for it and for each draft."""
        batch = self.batch
        for request_id, drafts in step.draft_token_ids.items():
            row = batch.requests[request_id].row
            known = int(batch.num_tokens[row])
            batch.token_ids[row, known : known + len(drafts)] = drafts
        known = batch.num_tokens[rows.rows]
        surplus = rows.starts + rows.counts - known  # drafts, or negative within a prompt
        requests = np.flatnonzero(surplus >= 0)
        last = rows.offsets[requests + 1] - 1
        if not step.draft_token_ids:
            return SampledRows(requests, requests, known[requests], last)
        repeats = surplus[requests] + 1
        owners = np.repeat(requests, repeats)
        firsts = np.cumsum(repeats) - repeats
        behind = np.arange(len(owners)) - np.repeat(firsts, repeats)
        places = np.repeat(last - surplus[requests], repeats) + behind
        return SampledRows(requests, owners, known[owners] + behind, places)

    def _prepare(self, rows: StepRows) -> tuple[torch.Tensor, ForwardContext]:
        """Ids and context in the persistent buffers."""
        batch, inputs = self.batch, self.inputs
        num_reqs, num_tokens = len(rows.requests), rows.num_tokens
        token_rows = rows.rows[rows.request_of]
        host_ids = batch.token_ids[token_rows, rows.positions]
        ends = rows.starts + rows.counts
        groups = range(len(batch.block_tables))
        width = -(-int(ends.max()) // batch.block_size)
        tensors = inputs.upload(
            ids=host_ids,
            positions=rows.positions,
            offsets=rows.offsets,
            seq_lens=ends,
            slots=[batch.slot_mapping(g, rows) for g in groups],
            tables=[batch.block_tables[g][rows.rows, :width] for g in groups],
        )
        if self.device.type != "cpu":
            self._fill_in_tokens(tensors.ids, host_ids, token_rows)
        num_decodes = int(np.argmax(rows.counts != 1)) if num_tokens != num_reqs else num_reqs
        fwd = ForwardContext(
            positions=tensors.positions,
            query_start_loc=tensors.offsets,
            seq_lens=tensors.seq_lens,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_decode_reqs=num_decodes,
            max_query_len=int(rows.counts.max()),
            max_seq_len=int(ends.max()),
            groups=[
                GroupMetadata(table, slots)
                for table, slots in zip(tensors.tables, tensors.slots, strict=True)
            ],
            block_size=batch.block_size,
        )
        if self.device.type == "cpu":
            fwd.query_start_loc_cpu, fwd.seq_lens_cpu = tensors.offsets, tensors.seq_lens
        return tensors.ids, fwd

    def _fill_in_tokens(
        self, ids: torch.Tensor, host_ids: np.ndarray, token_rows: np.ndarray
    ) -> None:
        """Tokens that the host does not know yet, from the device's own record."""
        unknown = np.flatnonzero(host_ids == _ON_ITS_WAY)
        if not len(unknown):
            return
        if len(unknown) == len(host_ids):
            ids.copy_(self.last_tokens[self.inputs.index(token_rows)])
        else:
            places = self.inputs.index(unknown)
            ids[places] = self.last_tokens[self.inputs.index(token_rows[unknown], 1)]

    def _forward(
        self,
        input_ids: torch.Tensor,
        fwd: ForwardContext,
        rows: StepRows,
        sampled: SampledRows,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of all tokens and logits of the sampled ones."""
        num_reqs = len(rows.requests)
        if self.graphs is not None and fwd.num_decode_reqs == num_reqs:
            replayed = self.graphs.run(input_ids, fwd)
            if replayed is not None:
                return replayed
        hidden = self.model(input_ids, fwd)
        if len(sampled.owners) == len(hidden):
            last = hidden
        elif not len(sampled.owners):
            return hidden, hidden.new_empty(0, self.vocab_size)
        else:
            last = hidden[self.inputs.index(sampled.places, 2)]
        return hidden, self.model.compute_logits(last)

    def _sampling_metadata(self, rows: StepRows, sampled: SampledRows) -> SamplingMetadata:
        """Kept from step to step while the batch stays as it is."""
        key = (self.batch.generation, rows.rows[sampled.owners].tobytes())
        if self._metadata is None or self._metadata[0] != key:
            params = [rows.requests[i].params for i in sampled.owners]
            self._metadata = (key, make_metadata(params, self.vocab_size, self.device))
        return self._metadata[1]

    def _sample(
        self,
        step: SchedulerOutput,
        rows: StepRows,
        sampled: SampledRows,
        metadata: SamplingMetadata,
        logits: torch.Tensor,
    ) -> SamplerOutput:
        batch = self.batch
        history = History(
            batch.token_ids,
            rows.rows[sampled.owners],
            sampled.known,
            [rows.requests[i].num_prompt_tokens for i in sampled.owners],
        )
        bitmask, masked = self._grammar(step, rows, sampled)
        output = sample(logits, metadata, history, bitmask, masked)
        if self.drafter is None:
            sampled_rows = rows.rows[sampled.requests]
            if self.device.type != "cpu" and len(sampled_rows):
                self.last_tokens[self.inputs.index(sampled_rows, 3)] = output.token_ids
            # The host's record grows at once; the tokens themselves follow.
            batch.token_ids[sampled_rows, batch.num_tokens[sampled_rows]] = _ON_ITS_WAY
            batch.num_tokens[sampled_rows] += 1
        return output

    def _grammar(
        self, step: SchedulerOutput, rows: StepRows, sampled: SampledRows
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Masks and the logits rows they are for; a request's rows follow each other."""
        if not step.grammar_bitmask:
            return None, None
        masks = np.frombuffer(step.grammar_bitmask, dtype=np.int32)
        masks = masks.reshape(len(step.grammar_request_ids), -1)
        rows_of: dict[str, list[int]] = {}
        for place, owner in enumerate(sampled.owners.tolist()):
            rows_of.setdefault(rows.requests[owner].request_id, []).append(place)
        here, places = [], []
        for index, request_id in enumerate(step.grammar_request_ids):
            if rows_of.get(request_id):
                here.append(index)
                places.append(rows_of[request_id].pop(0))
        if not here:
            return None, None
        mask = torch.from_numpy(masks[here].copy()).to(self.device)
        return mask, torch.tensor(places, device=self.device)

    def _prompt_logprobs(
        self, rows: StepRows, hidden: torch.Tensor
    ) -> list[tuple[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
        """For requests that ask: log-probabilities of the prompt tokens after this chunk's."""
        found: list[tuple[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = []
        if all(request.params.prompt_logprobs is None for request in rows.requests):
            return found
        for index, request in enumerate(rows.requests):
            wanted = request.params.prompt_logprobs
            start = int(rows.starts[index])
            # Position p tells of token p + 1, so the last prompt position tells nothing.
            end = min(start + int(rows.counts[index]), request.num_prompt_tokens - 1)
            if wanted is None or end <= start:
                continue
            first = int(rows.offsets[index])
            logits = self.model.compute_logits(hidden[first : first + end - start])
            targets = self.batch.token_ids[request.row, start + 1 : end + 1].astype(np.int64)
            tokens = torch.from_numpy(targets).to(self.device)
            found.append((request.request_id, gather_logprobs(logits, tokens, wanted)))
        return found


@dataclasses.dataclass
class SampledRows:
    """Where tokens are sampled: rows of logits, in the order of their requests."""

    requests: np.ndarray
    """(m,) indices of the requests that get tokens."""
    owners: np.ndarray
    """(n,) request of each logits row; a request with k drafts has 1 + k rows."""
    known: np.ndarray
    """(n,) tokens before the one that a row samples."""
    places: np.ndarray
    """(n,) token of the step whose hidden state a row reads."""


@dataclasses.dataclass
class StepResult:
    """A launched step; `result` waits for its tokens.

    Drafts are verified by sampling every position from the model itself and keeping a draft
    while it is what was sampled: a draft d survives with probability p(d), and the token in
    its place is distributed as p without d, which is rejection sampling (arXiv 2211.17192) for
    a drafter that proposes one token for certain.
    """

    runner: ModelRunner
    rows: StepRows
    sampled: SampledRows
    output: SamplerOutput
    prompt_logprobs: list[tuple[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]
    drafts: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.accepted: dict[int, list[int]] = {}
        """Request's index to its new tokens; after `settle`."""
        self._settled = False
        # On a GPU the copy runs behind the step on its own, into pinned memory.
        self._copy, self._copied = self.runner.inputs.copy_back(self.output.token_ids)

    def settle(self) -> None:
        """Wait for the tokens and write them into the host's record."""
        if self._settled:
            return
        self._settled = True
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._copy.tolist()
        if len(self.sampled.owners) == len(self.sampled.requests):
            owners = self.sampled.owners.tolist()
            self.accepted = {i: [t] for i, t in zip(owners, tokens, strict=True)}
        else:
            self._verify_drafts(tokens)
        self._record()

    def _verify_drafts(self, tokens: list[int]) -> None:
        """Keep a request's samples up to the first that is not the draft in its place."""
        token_ids, rows = self.runner.batch.token_ids, self.rows
        firsts: dict[int, int] = {}
        for owner, known, token in zip(
            self.sampled.owners.tolist(), self.sampled.known.tolist(), tokens, strict=True
        ):
            first, new = firsts.setdefault(owner, known), self.accepted.setdefault(owner, [])
            draft_before = token_ids[rows.requests[owner].row, known - 1]
            if known == first or (len(new) == known - first and new[-1] == draft_before):
                new.append(token)

    def _record(self) -> None:
        """Write the new tokens into the host's record of the requests that are still there."""
        batch, grows = self.runner.batch, self.runner.drafter is not None
        places = np.searchsorted(self.sampled.owners, self.sampled.requests)
        firsts = self.sampled.known[places].tolist()
        rows: list[int] = []
        columns: list[int] = []
        tokens: list[int] = []
        for first, (owner, new) in zip(firsts, self.accepted.items(), strict=True):
            request = self.rows.requests[owner]
            # A request that has left since has given its row away.
            if batch.requests.get(request.request_id) is not request or new[-1] < 0:
                continue
            for column, token in enumerate(new, first):
                rows.append(request.row)
                columns.append(column)
                tokens.append(token)
            if grows:
                batch.num_tokens[request.row] = first + len(new)
        batch.token_ids[rows, columns] = tokens

    def result(self) -> ModelRunnerOutput:
        """What the step computed."""
        self.settle()
        if self.runner._pending is self:
            self.runner._pending = None
        sampled_token_ids: list[list[int]] = [[] for _ in self.rows.requests]
        errors = {}
        for owner, new in self.accepted.items():
            if new[-1] < 0:
                errors[self.rows.requests[owner].request_id] = _NOT_A_NUMBER
            else:
                sampled_token_ids[owner] = new
        return ModelRunnerOutput(
            [r.request_id for r in self.rows.requests],
            sampled_token_ids,
            self._logprobs(),
            {name: _token_logprobs(*tensors) for name, tensors in self.prompt_logprobs},
            draft_token_ids=self.drafts,
            errors=errors,
        )

    def _logprobs(self) -> dict[str, list[TokenLogprobs]]:
        output = self.output
        if output.logprobs is None or output.logprob_ids is None or output.ranks is None:
            return {}
        entries = _token_logprobs(output.logprob_ids, output.logprobs, output.ranks)
        found: dict[str, list[TokenLogprobs]] = {}
        for place, owner in enumerate(self.sampled.owners.tolist()):
            request = self.rows.requests[owner]
            wanted, e = request.params.logprobs, entries[place]
            if wanted is None or len(found.get(request.request_id, ())) >= len(
                self.accepted[owner]
            ):
                continue
            end = 1 + wanted
            found.setdefault(request.request_id, []).append(
                TokenLogprobs(e.token_ids[:end], e.logprobs[:end], e.ranks[:end])
            )
        return found


def _token_logprobs(
    ids: torch.Tensor, logprobs: torch.Tensor, ranks: torch.Tensor
) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(i, v, [r, *range(1, len(i))])
        for i, v, r in zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    ]
