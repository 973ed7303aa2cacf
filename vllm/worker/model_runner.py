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
        self._metadata: tuple[Any, SamplingMetadata] | None = None
        self._pending: StepResult | None = None

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepResult:
        """Launch a step."""
        self.batch.update(step)
        rows = self.batch.step_rows(step)
        sampled = self._sampled_requests(rows)
        metadata = self._sampling_metadata(rows, sampled)
        on_host = self.device.type == "cpu" or metadata.needs_history or step.grammar_bitmask
        if self._pending is not None and on_host:
            self._pending.settle()  # this step depends on tokens on their way
        input_ids, fwd = self._prepare(rows)
        hidden, logits = self._forward(input_ids, fwd, rows, sampled)
        prompt_logprobs = self._prompt_logprobs(rows, hidden)
        output = self._sample(step, rows, sampled, metadata, logits)
        result = StepResult(self, rows, sampled, output, metadata, prompt_logprobs)
        self._pending = result
        return result

    def _sampled_requests(self, rows: StepRows) -> np.ndarray:
        """Indices of the requests whose last known token is computed in this step."""
        ends = rows.starts + rows.counts
        return np.flatnonzero(ends >= self.batch.num_tokens[rows.rows])

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
        sampled: np.ndarray,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of all tokens and logits of the sampled ones."""
        num_reqs = len(rows.requests)
        if self.graphs is not None and fwd.num_decode_reqs == num_reqs:
            replayed = self.graphs.run(input_ids, fwd)
            if replayed is not None:
                return replayed
        hidden = self.model(input_ids, fwd)
        if len(sampled) == len(hidden):
            last = hidden
        elif not len(sampled):
            return hidden, hidden.new_empty(0, self.vocab_size)
        else:
            last = hidden[self.inputs.index(rows.offsets[sampled + 1] - 1, 2)]
        return hidden, self.model.compute_logits(last)

    def _sampling_metadata(self, rows: StepRows, sampled: np.ndarray) -> SamplingMetadata:
        """Kept from step to step while the batch stays as it is."""
        key = (self.batch.generation, tuple(rows.rows[sampled].tolist()))
        if self._metadata is None or self._metadata[0] != key:
            params = [rows.requests[i].params for i in sampled]
            self._metadata = (key, make_metadata(params, self.vocab_size, self.device))
        return self._metadata[1]

    def _sample(
        self,
        step: SchedulerOutput,
        rows: StepRows,
        sampled: np.ndarray,
        metadata: SamplingMetadata,
        logits: torch.Tensor,
    ) -> SamplerOutput:
        sampled_rows = rows.rows[sampled]
        history = History(
            self.batch.token_ids,
            sampled_rows,
            self.batch.num_tokens[sampled_rows],
            [rows.requests[i].num_prompt_tokens for i in sampled],
        )
        bitmask, masked = self._grammar(step, rows, sampled)
        output = sample(logits, metadata, history, bitmask, masked)
        if self.device.type != "cpu" and len(sampled):
            self.last_tokens[self.inputs.index(sampled_rows, 3)] = output.token_ids
        # The host's record grows at once; the tokens themselves follow.
        self.batch.token_ids[sampled_rows, self.batch.num_tokens[sampled_rows]] = _ON_ITS_WAY
        self.batch.num_tokens[sampled_rows] += 1
        return output

    def _grammar(
        self, step: SchedulerOutput, rows: StepRows, sampled: np.ndarray
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not step.grammar_bitmask:
            return None, None
        index = {rows.requests[i].request_id: n for n, i in enumerate(sampled)}
        masks = np.frombuffer(step.grammar_bitmask, dtype=np.int32)
        masks = masks.reshape(len(step.grammar_request_ids), -1)
        here = [n for n, i in enumerate(step.grammar_request_ids) if i in index]
        if not here:
            return None, None
        places = [index[step.grammar_request_ids[n]] for n in here]
        mask = torch.from_numpy(masks[here].copy()).to(self.device)
        return mask, torch.tensor(places, device=self.device)

    def _prompt_logprobs(
        self, rows: StepRows, hidden: torch.Tensor
    ) -> list[tuple[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
        """For requests that ask: log-probabilities of the prompt tokens after this chunk's."""
        found = []
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
class StepResult:
    """A launched step; `result` waits for its tokens."""

    runner: ModelRunner
    rows: StepRows
    sampled: np.ndarray
    output: SamplerOutput
    metadata: SamplingMetadata
    prompt_logprobs: list[tuple[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]

    def __post_init__(self) -> None:
        self._tokens: list[int] | None = None
        self._places = self.runner.batch.num_tokens[self.rows.rows[self.sampled]] - 1
        self._generation = [r.request_id for r in self.rows.requests]
        # On a GPU the copy runs behind the step on its own, into pinned memory.
        self._copy, self._copied = self.runner.inputs.copy_back(self.output.token_ids)

    def settle(self) -> list[int]:
        """Wait for the tokens and write them into the host's record."""
        if self._tokens is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._tokens = self._copy.tolist()
            batch = self.runner.batch
            for index, place, token in zip(self.sampled, self._places, self._tokens, strict=True):
                request = self.rows.requests[index]
                # A request that has left since has given its row away.
                current = batch.requests.get(request.request_id)
                if current is not None and current is request and token >= 0:
                    batch.token_ids[current.row, place] = token
        return self._tokens

    def result(self) -> ModelRunnerOutput:
        """What the step computed."""
        tokens = self.settle()
        if self.runner._pending is self:
            self.runner._pending = None
        sampled_token_ids: list[list[int]] = [[] for _ in self.rows.requests]
        errors = {}
        for index, token in zip(self.sampled.tolist(), tokens, strict=True):
            if token < 0:
                errors[self.rows.requests[index].request_id] = _NOT_A_NUMBER
            else:
                sampled_token_ids[index] = [token]
        return ModelRunnerOutput(
            self._generation,
            sampled_token_ids,
            self._logprobs(),
            {name: _token_logprobs(*tensors) for name, tensors in self.prompt_logprobs},
            errors=errors,
        )

    def _logprobs(self) -> dict[str, list[TokenLogprobs]]:
        output = self.output
        if output.logprobs is None or output.logprob_ids is None or output.ranks is None:
            return {}
        all_rows = _token_logprobs(output.logprob_ids, output.logprobs, output.ranks)
        found = {}
        for position, index in enumerate(self.sampled.tolist()):
            request = self.rows.requests[index]
            wanted = request.params.logprobs
            if wanted is not None:
                entry = all_rows[position]
                found[request.request_id] = [
                    TokenLogprobs(
                        entry.token_ids[: 1 + wanted],
                        entry.logprobs[: 1 + wanted],
                        entry.ranks[: 1 + wanted],
                    )
                ]
        return found


def _token_logprobs(
    ids: torch.Tensor, logprobs: torch.Tensor, ranks: torch.Tensor
) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(i, v, [r, *range(1, len(i))])
        for i, v, r in zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    ]
