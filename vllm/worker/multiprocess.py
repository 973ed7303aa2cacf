# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks in processes of their own, on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

from vllm.worker.remote import RemoteExecutor, meeting_point, serve_rank

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from vllm.config.vllm import VllmConfig

_JOIN_S = 3.0


class MultiprocessExecutor(RemoteExecutor):
    """One process a rank, started with spawn: CUDA cannot be forked."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__()
        context = multiprocessing.get_context("spawn")
        address = meeting_point("127.0.0.1")
        self._processes: list[Any] = []
        try:
            for rank in range(vllm_config.parallel_config.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_run_rank,
                    args=(vllm_config, rank, address, theirs),
                    name=f"vllm-rank-{rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self._gather()
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()

    def _has_ended(self, rank: int) -> bool:
        return not self._processes[rank].is_alive()

    def _obituary(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(_JOIN_S)
        code = process.exitcode
        how = f"exit status {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        return f"worker process {process.name} (pid {process.pid}) ended with {how}"


def _run_rank(vllm_config: VllmConfig, rank: int, address: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end drains and tells us
    serve_rank(vllm_config, rank, address, pipe)
    os._exit(0)
