# SPDX-License-Identifier: Apache-2.0
"""Start `vllm serve` with the embedded model, ask it one question, print answer and speed, stop.

`make demo` runs this; it needs neither a GPU nor a network. Exit status 0 if an answer came.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from openai import OpenAI

QUESTION = "What is the capital of France, and what is it known for?"
READY_TIMEOUT_S = 120.0
MAX_TOKENS = 96


class DemoError(RuntimeError):
    """The demo failed; the message says where."""


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(server: subprocess.Popen[bytes], base_url: str) -> float:
    """Seconds until /health answered 200; raises `DemoError` if the server ends or hangs."""
    start = time.perf_counter()
    while time.perf_counter() - start < READY_TIMEOUT_S:
        if server.poll() is not None:
            raise DemoError(f"the server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"{base_url}/health", timeout=2) as reply:
                if reply.status == 200:
                    return time.perf_counter() - start
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise DemoError(f"the server was not healthy within {READY_TIMEOUT_S:.0f} s")


def ask(base_url: str) -> None:
    """Stream one chat completion to stdout; raises `DemoError` if it is empty."""
    client = OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=120)
    model = client.models.list().data[0].id
    print(f"model:  {model}\nyou:    {QUESTION}\nmodel:  ", end="", flush=True)
    start = time.perf_counter()
    first_token_at, num_tokens, text = None, 0, ""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            if piece and first_token_at is None:
                first_token_at = time.perf_counter()
            text += piece
            print(piece, end="", flush=True)
    end = time.perf_counter()
    print()
    if not text.strip() or first_token_at is None:
        raise DemoError("the answer is empty")
    decode_s = max(end - first_token_at, 1e-9)
    print(
        f"speed:  {num_tokens} tokens, first after {(first_token_at - start) * 1e3:.0f} ms, "
        f"then {max(num_tokens - 1, 0) / decode_s:.1f} tokens/s"
    )


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server as Ctrl-C would; raises `DemoError` if it does not end well."""
    server.send_signal(signal.SIGINT)
    try:
        status = server.wait(timeout=20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
        raise DemoError("the server did not stop within 20 s of SIGINT") from None
    if status != 0:
        raise DemoError(f"the server stopped with status {status}")


def main() -> int:
    """0 if the server started, answered and stopped."""
    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", "--host", "127.0.0.1", "--port", str(port)]
    print(f"server: {' '.join(['vllm', *command[1:]])}", flush=True)
    with tempfile.NamedTemporaryFile(prefix="vllm-demo-", suffix=".log") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            print(f"ready:  {wait_until_healthy(server, base_url):.1f} s", flush=True)
            ask(base_url)
            stop(server)
        except Exception as error:
            print(f"\nerror: {error}\nThe end of the server's log:", file=sys.stderr)
            tail = Path(log.name).read_text(errors="replace").splitlines()[-40:]
            print("\n".join(f"  {line}" for line in tail), file=sys.stderr)
            return 1
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
    print("done:   the server stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
