# SPDX-License-Identifier: Apache-2.0
"""Two real processes over Gloo give the logits of one rank."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from tests.fixtures.forward import load_tiny
from tests.fixtures.tiny_models import tiny_checkpoint
from vllm.distributed.parallel_state import TensorParallelGroup

PROMPT = list(range(3, 43))
# One key head for two ranks; a vocabulary that two ranks do not divide.
CASES: dict[str, dict[str, int]] = {
    "llama": {"num_key_value_heads": 1},
    "qwen2": {"vocab_size": 511},
    "qwen3": {},
    "qwen3_moe": {},
    "mixtral": {},
}


def _rank(rank: int, address: str, paths: dict[str, str], out: str) -> None:
    torch.set_num_threads(1)
    tp = TensorParallelGroup.join(rank, 2, address, torch.device("cpu"))
    logits = {}
    for family, path in paths.items():
        model = load_tiny(Path(path), tp=tp)
        rows = [model.step({"a": PROMPT[:30]})["a"], model.step({"a": PROMPT[30:]})["a"]]
        logits[family] = torch.cat(rows)
    torch.save(logits, f"{out}/{rank}.pt")
    tp.leave()


@pytest.fixture(scope="module")
def logits_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """Each rank's logits by family."""
    out = tmp_path_factory.mktemp("ranks")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    paths = {family: str(tiny_checkpoint(family, **more)) for family, more in CASES.items()}
    mp.spawn(_rank, (address, paths, str(out)), nprocs=2)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("family", CASES)
def test_two_ranks_give_the_logits_of_one(
    family: str, logits_of_two_ranks: list[dict[str, torch.Tensor]]
) -> None:
    expected = load_tiny(tiny_checkpoint(family, **CASES[family])).step({"a": PROMPT})["a"]
    for logits in logits_of_two_ranks:
        assert logits[family].shape == expected.shape
        assert (logits[family] - expected).abs().max() <= 1e-4
