# SPDX-License-Identifier: Apache-2.0
"""One server over a tiny model for all tests of the API."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.entrypoints.openai.server_process import Server, running_server
from tests.fixtures.tiny_models import tiny_checkpoint


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server of the tiny llama in float32, under the name "tiny"."""
    flags = ("--dtype", "float32", "--served-model-name", "tiny", "other-name")
    with running_server(tiny_checkpoint("llama"), *flags) as process:
        yield process


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of it."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
