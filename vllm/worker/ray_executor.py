# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks as Ray actors, on one machine or on several.

Ray places the actors, gives each its device and tells how one ended; steps and results go over
a connection of our own to each actor, as they do between processes (`remote`). An actor call
instead would cost a step some tenths of a millisecond, and would tell of a death later.

Devices: in an actor, Ray lets CUDA_VISIBLE_DEVICES name the one GPU that the actor got, so it is
device 0 of that process whatever the rank. A Ray that is started here knows only the GPUs that
this process sees, and rank r takes the r-th of them, as it does without Ray. In a cluster that
runs already, Ray chooses among the GPUs that it was started with, since it knows which are
taken; ranks are then in the order of nodes, this one first, and of devices in a node.

Environment: VLLM_* and what else tunes the libraries of a rank is passed on from this process,
but not what tells one host from another (VLLM_HOST_IP, CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config.vllm import MIN_CPU_RANKS
from vllm.errors import ConfigError, Diagnostic, EngineDeadError, ExitCode, ResourceError
from vllm.logger import init_logger
from vllm.platforms import host
from vllm.worker.remote import (
    RemoteExecutor,
    family_of,
    free_port,
    meeting_point,
    send_at_once,
    serve_rank,
)

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

logger = init_logger(__name__)

_START_S = 120.0
"""An actor's process: Python, Ray and this package are imported."""
_RESERVE_S = 20.0
"""Devices that another engine is just giving back come free within seconds."""
_REASON_S = 5.0
_ANSWER_S = 5.0
_OBJECT_STORE_BYTES = 80 << 20
"""About the least that Ray takes; nothing of ours goes through it."""
_PASSED_PREFIXES = ("VLLM_", "OMP_", "HF_", "NCCL_", "GLOO_", "TORCH", "TRITON_")
_PASSED = ("CUDA_DEVICE_ORDER", "TOKENIZERS_PARALLELISM")
_OF_ONE_HOST = ("VLLM_HOST_IP",)


class RayExecutor(RemoteExecutor):
    """One Ray actor a rank. Joins the cluster that RAY_ADDRESS or `ray start` names, else
    starts a small Ray on this machine and ends it again."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__()
        self._entered_ray = False
        """ray.init was called here: ray.shutdown then ends a Ray of our own or leaves a cluster."""
        self._group: Any = None
        self._actors: list[Any] = []
        self._places: list[Place] = []
        self._serving: list[Any] = []
        try:
            self._start(vllm_config)
            self._gather()
        except BaseException:
            self.shutdown()
            raise

    def _start(self, vllm_config: VllmConfig) -> None:
        key = os.urandom(32)
        self._place_actors(vllm_config, key)
        (address,) = _answers([self._actors[0].meeting_point.remote()])
        ranks_on = Counter(place.node_id for place in self._places)
        for rank, (actor, place) in enumerate(zip(self._actors, self._places, strict=True)):
            logger.info("rank %d: %s", rank, place)
            threads = None if "OMP_NUM_THREADS" in os.environ else ranks_on[place.node_id]
            self._serving.append(actor.serve.remote(vllm_config, rank, address, threads))
        for rank, place in enumerate(self._places):
            self._pipes.append(self._connect_to(rank, place, key))

    def _place_actors(self, vllm_config: VllmConfig, key: bytes) -> None:
        """An actor on a device for each rank, and all of them in the order of ranks."""
        num_ranks = vllm_config.parallel_config.world_size
        device = vllm_config.device_config
        resource = "CPU" if device.kind == "cpu" else "GPU"
        num_here = len(device.devices) or num_ranks
        if resource == "CPU":
            num_here = max(MIN_CPU_RANKS, host.num_cores())
        self._entered_ray = _connect(resource, min(num_ranks, num_here))
        self._group = _reserve(resource, num_ranks)
        self._actors = [_start_actor(self._group, i, resource, key) for i in range(num_ranks)]
        model_path = vllm_config.model_config.model_path
        places = _answers([actor.place.remote(model_path) for actor in self._actors])
        lacking = sorted({place.host for place in places if not place.has_model})
        if lacking and vllm_config.load_config.load_format != "dummy":
            raise ConfigError(_no_model(model_path, lacking))
        order = rank_order(places, _node_id(), os.environ)
        self._actors = [self._actors[i] for i in order]
        self._places = [places[i] for i in order]

    def shutdown(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        if self._group is None and not self._entered_ray:
            return
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None
        if self._entered_ray:
            self._entered_ray = False
            ray.shutdown()

    def _connect_to(self, rank: int, place: Place, key: bytes) -> Connection:
        try:
            pipe = Client((place.host, place.port), family_of(place.host), authkey=key)
        except (OSError, EOFError) as error:
            if self._has_ended(rank):
                raise EngineDeadError(self._obituary(rank)) from error
            raise EngineDeadError(
                f"rank {rank} ({place}) cannot be reached from here: {error}"
            ) from error
        send_at_once(pipe)
        return pipe

    def _has_ended(self, rank: int) -> bool:
        import ray

        ended, _ = ray.wait([self._serving[rank]], timeout=0)
        return bool(ended)

    def _obituary(self, rank: int) -> str:
        import ray

        try:
            ray.get(self._serving[rank], timeout=_REASON_S)
            reason = "it ended its work without being told to"
        except ray.exceptions.GetTimeoutError:
            reason = "it closed its connection"
        except ray.exceptions.RayError as error:
            reason = _last_line(error)
        return f"rank {rank} ({self._places[rank]}) is gone: {reason}"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an actor is."""

    node_id: str
    host: str
    """Address at which other nodes reach it."""
    port: int
    """Where it waits for our connection."""
    pid: int
    devices: tuple[str, ...]
    """Ray's names of its GPUs, as in CUDA_VISIBLE_DEVICES; () on the CPU."""
    has_model: bool
    """The model's files lie there where they lie here."""

    def __str__(self) -> str:
        device = f"GPU {', '.join(self.devices)}, " if self.devices else ""
        return f"Ray actor, {device}pid {self.pid} on {self.host}"


def rank_order(places: Sequence[Place], here: str, environ: Mapping[str, str]) -> list[int]:
    """Indices of `places` in the order of ranks.

    The node `here` first, then node by node; in a node in the order of this process's
    CUDA_VISIBLE_DEVICES, then by number.
    """
    visible = [v.strip() for v in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]

    def key(index: int) -> tuple[Any, ...]:
        place = places[index]
        name = place.devices[0] if place.devices else ""
        seen = visible.index(name) if name in visible else len(visible)
        return place.node_id != here, place.host, place.node_id, seen, len(name), name, index

    return sorted(range(len(places)), key=key)


class Rank:
    """An actor: tells where it is, then serves until its connection closes."""

    def __init__(self, key: bytes) -> None:
        import ray

        self._host = envs.VLLM_HOST_IP or ray.util.get_node_ip_address()
        self._port = free_port(self._host)
        self._listener = Listener((self._host, self._port), family_of(self._host), authkey=key)
        self._pipe: Connection | None = None

    def place(self, model_path: str) -> Place:
        import ray

        context = ray.get_runtime_context()
        devices = tuple(context.get_accelerator_ids().get("GPU", ()))
        has_model = os.path.exists(model_path)
        return Place(context.get_node_id(), self._host, self._port, os.getpid(), devices, has_model)

    def meeting_point(self) -> str:
        return meeting_point(self._host)

    def serve(
        self, vllm_config: VllmConfig, rank: int, address: str, share_cores_among: int | None
    ) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end drains and tells us
        if share_cores_among is not None:
            # Ray has set it to the number of CPUs that the actor asked for; torch comes later.
            threads = max(1, host.num_cores() // share_cores_among)
            os.environ["OMP_NUM_THREADS"] = str(threads)
        # Left open at the end, so that its last words can be read; the process is killed.
        self._pipe = self._listener.accept()
        send_at_once(self._pipe)
        serve_rank(vllm_config, rank, address, self._pipe, device_index=0)


def _connect(resource: str, num_devices: int) -> bool:
    """Join or start Ray; False if this process is with it already. Raises `ResourceError`."""
    import ray

    if ray.is_initialized():
        return False
    address = _cluster_address()
    options: dict[str, Any] = {"address": address, "logging_level": logging.ERROR}
    if address:
        _check_answer(address)
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {
            "address": "local",
            "num_cpus": num_devices,
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
        }
        if resource == "GPU":
            options["num_gpus"] = num_devices
    with _own_sigterm_handler():
        ray.init(**options)
    logger.info("Ray: %s", f"cluster at {address}" if address else "started on this machine")
    return True


def _cluster_address() -> str:
    """host:port of the cluster that RAY_ADDRESS names or `ray start` left here; "" for none."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto"):
        directory = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        file = Path(directory, "ray", "ray_current_cluster")
        return file.read_text().strip() if file.exists() else ""
    return "" if address == "local" else address


def _check_answer(address: str) -> None:
    """Raise `ResourceError` where nothing listens: Ray would try for minutes."""
    name, _, port = address.rpartition(":")
    try:
        if "://" in address:
            raise ValueError("an engine must be a node's own process, not a client of Ray")
        socket.create_connection((name.strip("[]"), int(port)), _ANSWER_S).close()
    except (OSError, ValueError) as error:
        named = os.environ.get("RAY_ADDRESS", "") == address
        raise ResourceError(
            Diagnostic(
                "ray-cluster",
                f"no Ray cluster can be joined at {address}",
                why=str(error),
                where="RAY_ADDRESS" if named else "the address that ray start left behind",
                fix="correct RAY_ADDRESS, or RAY_ADDRESS=local for this machine alone"
                + ("" if named else "; ray stop forgets the address"),
                exit_code=ExitCode.RESOURCE,
            )
        ) from error


@contextlib.contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Put back what ray.init replaces by a handler that exits the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _reserve(resource: str, num_ranks: int) -> Any:
    """A placement group with a device for each rank, on one node where they fit."""
    import ray
    from ray.util.placement_group import placement_group

    counts = [n["Resources"].get(resource, 0) for n in ray.nodes() if n["Alive"]]
    if sum(counts) < num_ranks:
        raise ResourceError(_too_small(resource, num_ranks, counts, "has", "more nodes"))
    for strategy in ("STRICT_PACK", "PACK"):
        if strategy == "STRICT_PACK" and max(counts) < num_ranks:
            continue
        group = placement_group([{resource: 1}] * num_ranks, strategy=strategy)
        if group.wait(_RESERVE_S):
            return group
        ray.util.remove_placement_group(group)
    free = [ray.available_resources().get(resource, 0)]
    raise ResourceError(_too_small(resource, num_ranks, free, "has free", "end other jobs"))


def _start_actor(group: Any, bundle: int, resource: str, key: bytes) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    environment = {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_PASSED_PREFIXES) or name in _PASSED) and name not in _OF_ONE_HOST
    }
    # Set for a whole cluster by some who run other things on it: every rank would see every GPU.
    environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = ""
    return (
        ray.remote(Rank)
        .options(
            num_cpus=int(resource == "CPU"),
            num_gpus=int(resource == "GPU"),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
            runtime_env={"env_vars": environment},
        )
        .remote(key)
    )


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _answers(references: list[Any]) -> list[Any]:
    import ray

    try:
        answers: list[Any] = ray.get(references, timeout=_START_S)
    except ray.exceptions.RayError as error:
        # Its text holds the actor's traceback, which belongs into the file that the core writes.
        raise EngineDeadError(f"a Ray actor did not start: {_last_line(error)}") from error
    return answers


def _last_line(error: Exception) -> str:
    """Ray's reason, without ids before it and guesses behind it."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip().partition(" Some common causes")[0] if lines else type(error).__name__


def _no_model(model_path: str, hosts: list[str]) -> Diagnostic:
    return Diagnostic(
        "model-missing",
        f"{model_path} does not exist on {', '.join(hosts)}",
        why="each rank reads the model's files on its own node",
        fix="share the directory between the nodes, or copy it to the same path on each",
    )


def _too_small(
    resource: str, num_ranks: int, counts: Sequence[float], has: str, fix: str
) -> Diagnostic:
    nodes = f" on {len(counts)} nodes" if len(counts) > 1 else ""
    return Diagnostic(
        "ray-cluster",
        f"{num_ranks} ranks want {num_ranks} devices, the Ray cluster {has} {sum(counts):g}{nodes}",
        why=f"a rank takes one {resource}, as Ray counts them",
        where="--tensor-parallel-size",
        fix=f"{fix}, or a smaller --tensor-parallel-size",
        exit_code=ExitCode.RESOURCE,
    )
