# SPDX-License-Identifier: Apache-2.0
"""What the core sends to what a caller sees: text, stop strings, log-probabilities, times.

The common case of offline work, only the end wanted and no stop strings, costs one list
extension a token; the text is made once, when the sequence has ended.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vllm.engine.input_processor import ProcessedRequest
from vllm.engine.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, TokenLogprobs
from vllm.errors import RequestError
from vllm.metrics.stats import FinishedRequestStats, IterationStats
from vllm.outputs import (
    CompletionOutput,
    Logprob,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
)
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers.detokenizer import Detokenizer

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.tokenizers import Tokenizer

INVALID_REQUEST = "invalid-request"  # engine.core's word for "the client's fault"


class RequestFailed(RuntimeError):
    """A request that failed alone in the core, by no fault of its client."""


class RequestState:
    """A request with its `n` sequences."""

    def __init__(self, request: ProcessedRequest, tokenizer: Tokenizer | None) -> None:
        params = request.sampling_params
        self.request_id = request.request_id
        self.prompt = request.prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.params = params
        self.final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        self.metrics = RequestMetrics(request.arrival_time)
        self.num_cached_tokens = 0
        self.prompt_logprobs: PromptLogprobs | None = None
        self.sequences = [
            SequenceState(self, sequence.request_id, index, tokenizer)
            for index, sequence in enumerate(request.sequences)
        ]
        self.num_running = len(self.sequences)

    def output(self, completions: list[CompletionOutput]) -> RequestOutput:
        """What the caller is handed now."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            completions,
            finished=self.num_running == 0,
            prompt_logprobs=self.prompt_logprobs,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )


class SequenceState:
    """One continuation of a prompt."""

    def __init__(
        self, request: RequestState, sequence_id: str, index: int, tokenizer: Tokenizer | None
    ) -> None:
        params = request.params
        self.request = request
        self.sequence_id = sequence_id
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: SampleLogprobs | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.text = ""
        self.last_token_time = 0.0
        self.num_taken = 0
        """Tokens that the caller has, with output kind DELTA."""
        self.detokenizer: Detokenizer | None = None
        """Unless the text is not wanted, or only at the end."""
        if tokenizer and params.detokenize and (params.stop_strings or not request.final_only):
            self.detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop_strings,
                include_stop_str=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    def completion(self) -> CompletionOutput:
        """Everything so far, or with DELTA what is new since the last call."""
        delta = self.request.params.output_kind is RequestOutputKind.DELTA
        token_ids, logprobs, text = self.token_ids, self.logprobs, self.text
        if delta:
            token_ids = token_ids[self.num_taken :]
            logprobs = None if logprobs is None else logprobs[self.num_taken :]
            self.num_taken = len(self.token_ids)
            text = self.detokenizer.take_delta() if self.detokenizer else ""
        elif self.detokenizer is not None:
            text = self.detokenizer.certain_text
        return CompletionOutput(
            self.index,
            text,
            token_ids if delta or self.finish_reason else list(token_ids),
            self.cumulative_logprob if self.logprobs is not None else None,
            logprobs,
            self.finish_reason,
            self.stop_reason,
        )


@dataclasses.dataclass
class ProcessedOutputs:
    """What one message from the core means to callers."""

    outputs: list[RequestOutput] = dataclasses.field(default_factory=list)
    aborts: list[str] = dataclasses.field(default_factory=list)
    """Sequences that a stop string ended: the core does not know yet."""
    errors: list[tuple[str, Exception]] = dataclasses.field(default_factory=list)
    """Requests that failed, with the reason to raise."""
    stats: IterationStats | None = None


class OutputProcessor:
    """Keeps the state of every request under way."""

    def __init__(self, tokenizer: Tokenizer | None, log_stats: bool = False) -> None:
        self._tokenizer = tokenizer
        self._log_stats = log_stats
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[str, SequenceState] = {}

    @property
    def num_unfinished(self) -> int:
        """Requests under way."""
        return len(self._requests)

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests under way."""
        return list(self._requests)

    def add(self, request: ProcessedRequest) -> None:
        """Expect outputs for a request. Raises `RequestError` if its id is in use."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        state = RequestState(request, self._tokenizer)
        self._requests[request.request_id] = state
        for sequence in state.sequences:
            self._sequences[sequence.sequence_id] = sequence

    def remove(self, request_id: str) -> list[str]:
        """Forget a request. Returns the sequences that the core still runs."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return []
        ids = [s.sequence_id for s in state.sequences if s.sequence_id in self._sequences]
        for sequence_id in ids:
            del self._sequences[sequence_id]
        return ids

    def process(self, message: EngineCoreOutputs) -> ProcessedOutputs:
        """Take in one step's outputs."""
        result = ProcessedOutputs(stats=IterationStats() if self._log_stats else None)
        now = message.timestamp
        sequences = self._sequences
        for output in message.outputs:
            sequence = sequences.get(output.request_id)
            if sequence is None:
                continue  # aborted meanwhile
            if not sequence.token_ids or result.stats is not None:
                self._record_times(sequence, output, now, result.stats)
            self._take(sequence, output, now, result)
        return result

    def _take(
        self,
        sequence: SequenceState,
        output: EngineCoreOutput,
        now: float,
        result: ProcessedOutputs,
    ) -> None:
        request = sequence.request
        if output.finish_reason is FinishReason.ERROR:
            result.errors.append((request.request_id, _error_of(output)))
            result.aborts += [i for i in self.remove(request.request_id) if i != output.request_id]
            return
        if output.prompt_logprobs is not None:
            self._add_prompt_logprobs(request, output.prompt_logprobs)
        ended = self._add_tokens(sequence, output)
        if not ended:
            if not request.final_only and (output.new_token_ids or output.prompt_logprobs):
                self._emit_running(sequence, result)
            return
        if output.finish_reason is None:
            result.aborts.append(sequence.sequence_id)
        self._finish(sequence, now, result)

    def _emit_running(self, sequence: SequenceState, result: ProcessedOutputs) -> None:
        completion = sequence.completion()
        delta = sequence.request.params.output_kind is RequestOutputKind.DELTA
        if delta and not completion.text and not completion.token_ids:
            return
        result.outputs.append(sequence.request.output([completion]))

    def _add_tokens(self, sequence: SequenceState, output: EngineCoreOutput) -> bool:
        """Append what is new; whether the sequence has ended, by the core or a stop string."""
        new, finish = output.new_token_ids, output.finish_reason
        detokenizer = sequence.detokenizer
        if detokenizer is not None:
            text_ids = new
            if finish is FinishReason.STOP and not _shows_stop_token(sequence.request.params):
                text_ids = new[:-1] if _stopped_by_token(sequence, output) else new
            hit = detokenizer.append(text_ids)
            if hit is not None:
                new, sequence.stop_reason = new[: hit[0]], hit[1]
                sequence.finish_reason = str(FinishReason.STOP)
        sequence.token_ids += new
        if sequence.logprobs is not None and output.logprobs is not None:
            for entry in output.logprobs[: len(new)]:
                sequence.cumulative_logprob += entry.logprobs[0]
                sequence.logprobs.append(self._logprobs(entry))
        if sequence.finish_reason is None and finish is not None:
            sequence.finish_reason = str(finish)
            sequence.stop_reason = output.stop_reason
            late = detokenizer.finish() if detokenizer is not None else None
            if late is not None:
                sequence.stop_reason, sequence.finish_reason = late, str(FinishReason.STOP)
        return sequence.finish_reason is not None

    def _finish(self, sequence: SequenceState, now: float, result: ProcessedOutputs) -> None:
        request = sequence.request
        del self._sequences[sequence.sequence_id]
        request.num_running -= 1
        request.metrics.finished_time = now
        self._complete_text(sequence)
        if result.stats is not None:
            result.stats.finished.append(_finished_stats(sequence, now))
        if request.num_running == 0:
            del self._requests[request.request_id]
        if not request.final_only:
            result.outputs.append(request.output([sequence.completion()]))
        elif request.num_running == 0:
            result.outputs.append(request.output([s.completion() for s in request.sequences]))

    def _complete_text(self, sequence: SequenceState) -> None:
        """Make the text in one go where nobody needed it earlier."""
        params = sequence.request.params
        if sequence.detokenizer is not None or self._tokenizer is None or not params.detokenize:
            return
        ids = sequence.token_ids
        by_token = sequence.finish_reason == "stop" and _ends_with_stop_token(sequence)
        if by_token and not _shows_stop_token(params):
            ids = ids[:-1]
        sequence.text = self._tokenizer.decode_continuation(ids, params.skip_special_tokens)

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        text = self._tokenizer.token_text if self._tokenizer else lambda _: None
        return {
            token_id: Logprob(logprob, rank, text(token_id))
            for token_id, logprob, rank in zip(
                entry.token_ids, entry.logprobs, entry.ranks, strict=True
            )
        }

    def _add_prompt_logprobs(self, request: RequestState, pieces: list[TokenLogprobs]) -> None:
        if request.prompt_logprobs is None:
            request.prompt_logprobs = [None]  # the first token has nothing before it
        room = len(request.prompt_token_ids) - len(request.prompt_logprobs)
        # With n > 1 every sequence reports them; the first to arrive is enough.
        request.prompt_logprobs += [self._logprobs(piece) for piece in pieces[:room]]

    def _record_times(
        self,
        sequence: SequenceState,
        output: EngineCoreOutput,
        now: float,
        stats: IterationStats | None,
    ) -> None:
        request = sequence.request
        if output.scheduled_time is not None and request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = output.scheduled_time
            request.num_cached_tokens = output.num_cached_tokens
        num_new = len(output.new_token_ids)
        if num_new == 0:
            return
        first = not sequence.token_ids
        if first and request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        if stats is not None:
            stats.num_generation_tokens += num_new
            if first:
                stats.num_prompt_tokens += len(request.prompt_token_ids)
                stats.times_to_first_token_s.append(now - request.metrics.arrival_time)
            else:
                stats.inter_token_latencies_s.append(now - sequence.last_token_time)
        sequence.last_token_time = now


def _shows_stop_token(params: SamplingParams) -> bool:
    return params.include_stop_str_in_output


def _stopped_by_token(sequence: SequenceState, output: EngineCoreOutput) -> bool:
    """Whether the last new token is a stop token (a grammar's end leaves the text whole)."""
    return bool(output.new_token_ids) and _is_stop_token(sequence, output.new_token_ids[-1])


def _ends_with_stop_token(sequence: SequenceState) -> bool:
    return bool(sequence.token_ids) and _is_stop_token(sequence, sequence.token_ids[-1])


def _is_stop_token(sequence: SequenceState, token_id: int) -> bool:
    params = sequence.request.params
    eos = () if params.ignore_eos else params.eos_token_ids or ()
    return token_id in eos or token_id in (params.stop_token_ids or ())


def _error_of(output: EngineCoreOutput) -> Exception:
    reason = output.error or "the request failed"
    if output.stop_reason == INVALID_REQUEST:
        return RequestError(reason)
    return RequestFailed(reason)


def _finished_stats(sequence: SequenceState, now: float) -> FinishedRequestStats:
    request = sequence.request
    metrics = request.metrics
    scheduled = metrics.first_scheduled_time or metrics.arrival_time
    first_token = metrics.first_token_time or now
    return FinishedRequestStats(
        sequence.finish_reason or "",
        len(request.prompt_token_ids),
        len(sequence.token_ids),
        request.num_cached_tokens,
        request.params.max_tokens,
        request.params.n,
        e2e_s=now - metrics.arrival_time,
        queued_s=max(0.0, scheduled - metrics.arrival_time),
        prefill_s=max(0.0, first_token - scheduled),
        decode_s=max(0.0, now - first_token),
    )
