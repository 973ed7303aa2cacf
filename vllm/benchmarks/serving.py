# SPDX-License-Identifier: Apache-2.0
"""Load on a running server: arrival times, first tokens, gaps between tokens."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import time
from typing import Any

from vllm.errors import Diagnostic, ExitCode, ResourceError


@dataclasses.dataclass
class Timing:
    """One request, in seconds."""

    start: float
    token_times: list[float] = dataclasses.field(default_factory=list)
    output_tokens: int = 0
    error: str = ""


def serve(args: argparse.Namespace, engine: None) -> dict[str, Any]:
    """Send the requests; raises `ResourceError` if none is answered."""
    return asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> dict[str, Any]:
    import openai

    client = openai.AsyncOpenAI(base_url=f"{args.base_url}/v1", api_key="none", max_retries=0)
    try:
        model = args.model or (await client.models.list()).data[0].id
    except openai.OpenAIError as error:
        raise _unreachable(args.base_url, str(error)) from None
    generator = random.Random(args.seed)
    gate = asyncio.Semaphore(args.max_concurrency or args.num_prompts)
    start = time.perf_counter()
    tasks = []
    for _ in range(args.num_prompts):
        prompt = [generator.randrange(5, 1000) for _ in range(args.input_len)]
        tasks.append(asyncio.create_task(_request(client, model, prompt, args.output_len, gate)))
        if args.request_rate != float("inf"):
            await asyncio.sleep(generator.expovariate(args.request_rate))
    timings = await asyncio.gather(*tasks)
    elapsed = time.perf_counter() - start
    await client.close()
    done = [t for t in timings if t.token_times and not t.error]
    if not done:
        raise _unreachable(args.base_url, timings[0].error)
    return _summary(done, len(timings) - len(done), elapsed, args.input_len)


async def _request(
    client: Any, model: str, prompt: list[int], output_len: int, gate: asyncio.Semaphore
) -> Timing:
    import openai

    async with gate:
        timing = Timing(time.perf_counter())
        try:
            stream = await client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=output_len,
                temperature=0.0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                if chunk.choices:
                    timing.token_times.append(time.perf_counter())
                if chunk.usage:
                    timing.output_tokens = chunk.usage.completion_tokens
        except openai.OpenAIError as error:
            timing.error = str(error)
    return timing


def _summary(done: list[Timing], failed: int, elapsed: float, input_len: int) -> dict[str, Any]:
    output = sum(t.output_tokens for t in done)
    first = [(t.token_times[0] - t.start) * 1e3 for t in done]
    gaps = [
        (b - a) * 1e3 for t in done for a, b in zip(t.token_times, t.token_times[1:], strict=False)
    ]
    per_token = [
        (t.token_times[-1] - t.token_times[0]) * 1e3 / (t.output_tokens - 1)
        for t in done
        if t.output_tokens > 1
    ]
    result: dict[str, Any] = {
        "completed": len(done),
        "failed": failed,
        "duration_s": elapsed,
        "request_throughput": len(done) / elapsed,
        "output_throughput": output / elapsed,
        "total_token_throughput": (output + input_len * len(done)) / elapsed,
    }
    for name, values in (("ttft", first), ("tpot", per_token), ("itl", gaps)):
        if values:
            ordered = sorted(values)
            result[f"mean_{name}_ms"] = sum(values) / len(values)
            result[f"median_{name}_ms"] = ordered[len(ordered) // 2]
            result[f"p99_{name}_ms"] = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return result


def _unreachable(url: str, why: str) -> ResourceError:
    return ResourceError(
        Diagnostic(
            "server-unreachable",
            f"the server at {url} does not answer",
            why=why.splitlines()[0] if why else "",
            fix="start vllm serve, or correct --base-url",
            exit_code=ExitCode.RESOURCE,
        )
    )
