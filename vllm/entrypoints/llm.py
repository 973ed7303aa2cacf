# SPDX-License-Identifier: Apache-2.0
"""`LLM`: offline generation in Python, the engine core in this process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.engine.input_processor import InputProcessor, Prompt
from vllm.engine.output_processor import OutputProcessor
from vllm.entrypoints.chat import render_chat
from vllm.errors import RequestError
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

logger = init_logger(__name__)

Messages = list[dict[str, Any]]


class LLM:
    """A model with an engine around it.

    `settings` are the engine's, by their flags' names (`tensor_parallel_size=2`). The
    constructor checks everything before torch is imported and raises `VLLMError` for what
    cannot run here.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        self.vllm_config = EngineArgs(model=model, **settings).create_engine_config(
            defer_errors=True
        )
        from vllm import preflight

        report = preflight.run(self.vllm_config)
        report.raise_for_errors()
        for finding in report.findings:
            logger.warning("%s", finding)
        from vllm.engine.client import make_engine_client
        from vllm.tokenizers import get_tokenizer

        model_config = self.vllm_config.model_config
        self.tokenizer = None if model_config.skip_tokenizer_init else get_tokenizer(model_config)
        self._input = InputProcessor(self.vllm_config, self.tokenizer)
        self._output = OutputProcessor(self.tokenizer)
        self._request_ids = itertools.count()
        self._engine = make_engine_client(self.vllm_config)

    def get_tokenizer(self) -> Any:
        """The tokenizer, or None with `skip_tokenizer_init`."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters with the defaults that the model's authors give."""
        return SamplingParams(**self.vllm_config.model_config.default_sampling_params())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts: strings, token ids or dicts; one or a list, one set of parameters
        for all or one each. Results come in the order of the prompts.

        Raises `RequestError` before anything runs if one of them cannot be served.
        """
        items = _as_list(prompts)
        params = self._params_for(items, sampling_params)
        priorities = priority or [0] * len(items)
        if len(priorities) != len(items):
            raise RequestError(
                f"{len(items)} prompts have {len(priorities)} priorities", "priority"
            )
        return self._run(items, params, priorities, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation or each of several. Raises `RequestError` like `generate`."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        prompts: list[Prompt] = [
            render_chat(
                self.tokenizer,
                self.vllm_config.model_config,
                conversation,
                template=chat_template,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            ).as_prompt()
            for conversation in conversations
        ]
        params = self._params_for(prompts, sampling_params)
        return self._run(prompts, params, [0] * len(prompts), use_tqdm, add_special_tokens=False)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        return self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Give memory and devices back; the object is of no use afterwards."""
        self._engine.shutdown()

    def _params_for(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            shared = sampling_params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
            return [shared] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts have {len(sampling_params)} sampling parameters",
                "sampling_params",
            )
        return [p.clone(output_kind=RequestOutputKind.FINAL_ONLY) for p in sampling_params]

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        use_tqdm: bool,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        requests = [
            self._input.process(
                str(next(self._request_ids)),
                prompt,
                prompt_params,
                priority=prompt_priority,
                add_special_tokens=add_special_tokens,
            )
            for prompt, prompt_params, prompt_priority in zip(
                prompts, params, priorities, strict=True
            )
        ]
        try:
            for request in requests:
                self._output.add(request)
                for sequence in request.sequences:
                    self._engine.add_request(sequence)
            with _progress_bar(len(requests), use_tqdm) as advance:
                finished = self._step_until_done(advance)
        except BaseException:
            self._abort_all()
            raise
        return [finished[request.request_id] for request in requests]

    def _step_until_done(self, advance: Any) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        while self._output.num_unfinished:
            processed = self._output.process(self._engine.step())
            if processed.aborts:
                self._engine.abort(processed.aborts)
            if processed.errors:
                raise processed.errors[0][1]
            for output in processed.outputs:
                finished[output.request_id] = output
                advance(output)
        return finished

    def _abort_all(self) -> None:
        """After an error: leave an engine that can take the next call."""
        for request_id in self._output.request_ids:
            sequences = self._output.remove(request_id)
            with contextlib.suppress(RuntimeError):  # a dead engine has nothing to abort
                self._engine.abort(sequences)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence):
        kind = type(prompts).__name__
        raise RequestError(f"prompts must be strings, token ids or dicts, got {kind}", "prompt")
    if prompts and type(prompts[0]) is int:
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


@contextlib.contextmanager
def _progress_bar(total: int, wanted: bool) -> Iterator[Any]:
    """A bar on stderr with input and output tokens a second; yields its `advance`."""
    if not wanted:
        yield lambda output: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("Processed prompts", total=total, speed="")
        num_in = num_out = 0

        def advance(output: RequestOutput) -> None:
            nonlocal num_in, num_out
            num_in += len(output.prompt_token_ids)
            num_out += sum(len(c.token_ids) for c in output.outputs)
            elapsed = progress.tasks[task].elapsed or 1e-9
            speed = f"in {num_in / elapsed:,.0f} tok/s, out {num_out / elapsed:,.0f} tok/s"
            progress.update(task, advance=1, speed=speed)

        yield advance
