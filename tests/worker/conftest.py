# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine, in a directory of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def ray_directory() -> Iterator[Path]:
    """Ray is installed; what it writes goes here, and no cluster of the developer is joined."""
    pytest.importorskip("ray", reason='needs Ray: pip install "vllm[ray]"')
    # Not pytest's own directory: the paths of Ray's sockets must stay below 107 bytes.
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", directory)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        yield Path(directory)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="package")
def two_nodes(ray_directory: Path) -> Iterator[str]:
    """The address of a cluster of two nodes, one CPU each."""
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    yield str(cluster.address)
    cluster.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def joined(two_nodes: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """That cluster is the one that an engine joins."""
    monkeypatch.setenv("RAY_ADDRESS", two_nodes)
    return two_nodes
