# SPDX-License-Identifier: Apache-2.0
"""What surrounds the weights: tokenizer, chat template, host limits, installed torch."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import msgspec

from vllm.config.gguf_header import Array, read_gguf_header
from vllm.errors import ConfigError, Diagnostic, ExitCode

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "tiktoken.model",
)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
MIN_SHM_BYTES = 64 << 20
"""What tensor-parallel ranks on one host exchange through /dev/shm at the least."""
MIN_OPEN_FILES = 1024


class _AddedToken(msgspec.Struct):
    id: int
    content: str = ""


class _BpeModel(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _ConfiguredToken(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """The parts of tokenizer_config.json that are used, as they must be."""

    added_tokens_decoder: dict[int, _ConfiguredToken] | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that say how many ids there are."""

    model: _BpeModel
    added_tokens: list[_AddedToken] = []


def check_tokenizer(path: str, embedding_rows: int, inkling: bool = False) -> list[Diagnostic]:
    """Is a tokenizer in `path`, and do its ids fit the embedding?

    With `inkling` it must also have the tokens of Inkling's chat format.
    """
    present = [n for n in _TOKENIZER_FILES if os.path.exists(os.path.join(path, n))]
    if not present:
        return [_no_tokenizer(path)]
    name, content = "tokenizer_config.json", None
    try:
        _check_config(os.path.join(path, name))
        name = "tokenizer.json"
        if name in present:
            content = _read_tokenizer(os.path.join(path, name))
    except (OSError, ValueError, RecursionError) as error:
        return [
            Diagnostic(
                "tokenizer-broken",
                f"{name} cannot be read",
                why=str(error),
                where=path,
                fix="download the file again",
            )
        ]
    if content is None:
        return []
    file = os.path.join(path, "tokenizer.json")
    found = _check_size(_num_ids(content), embedding_rows, file)
    found = found or _check_added(content, embedding_rows, file)
    return [*found, *_check_markers(content)] if inkling else found


def _check_added(content: _TokenizerFile, embedding_rows: int, file: str) -> list[Diagnostic]:
    """Added tokens without a row, such as a [PAD] of training: all other text can be served."""
    beyond = [t.content or str(t.id) for t in content.added_tokens if t.id >= embedding_rows]
    if not beyond:
        return []
    more = f" and {len(beyond) - 3} more" if len(beyond) > 3 else ""
    return [
        Diagnostic(
            "tokenizer-vocabulary",
            f"prompts with {', '.join(beyond[:3])}{more} will be refused",
            why=f"the ids of these added tokens are beyond the embedding's {embedding_rows:,} rows",
            where=file,
            fix="nothing to do if no prompt needs them",
            severity="warning",
        )
    ]


def _check_markers(content: _TokenizerFile) -> list[Diagnostic]:
    from vllm.tokenizers.inkling import markers_absent_from, markers_problem

    missing = markers_absent_from({t.content for t in content.added_tokens})
    return [markers_problem(missing)] if missing else []


def _check_size(size: int, embedding_rows: int, file: str) -> list[Diagnostic]:
    if size <= embedding_rows:
        return []
    return [
        Diagnostic(
            "tokenizer-vocabulary",
            f"the tokenizer has ids up to {size - 1:,}, the embedding ends at "
            f"{embedding_rows - 1:,}",
            why="such an id would read outside the embedding",
            where=file,
            fix="use the tokenizer of this checkpoint (--tokenizer)",
        )
    ]


def check_gguf_tokenizer(path: str, embedding_rows: int) -> list[Diagnostic]:
    """Is the vocabulary in a GGUF file of a kind that can be read, and does it fit?

    A file that cannot be read at all is told where its weights are looked at.
    """
    from vllm.tokenizers.gguf import vocabulary_problem

    try:
        metadata = read_gguf_header(path).metadata
    except ConfigError:
        return []
    tokens = metadata.get("tokenizer.ggml.tokens")
    size = tokens.length if isinstance(tokens, Array) else 0
    problem = vocabulary_problem(
        metadata.get("tokenizer.ggml.model"),
        metadata.get("tokenizer.ggml.pre", "default"),
        size > 0,
        path,
    )
    return [problem] if problem else _check_size(size, embedding_rows, path)


def _check_config(file: str) -> None:
    if os.path.exists(file):
        with open(file, "rb") as handle:
            msgspec.json.decode(handle.read(), type=_TokenizerConfig)


def _read_tokenizer(file: str) -> _TokenizerFile:
    with open(file, "rb") as handle:
        return msgspec.json.decode(handle.read(), type=_TokenizerFile)


def _num_ids(content: _TokenizerFile) -> int:
    """One more than the highest id of the vocabulary proper."""
    vocab, added = content.model.vocab, {t.id for t in content.added_tokens}
    if not isinstance(vocab, dict):  # Unigram lists its pieces in the order of their ids
        return len(vocab)
    return max(set(vocab.values()) - added, default=-1) + 1


def _no_tokenizer(path: str) -> Diagnostic:
    code = sorted(p.name for p in Path(path).glob("*.py"))
    config = _read_json(os.path.join(path, "tokenizer_config.json"))
    if code and config.get("auto_map"):
        return Diagnostic(
            "tokenizer-remote-code",
            f"the tokenizer of {path} is Python code in the repository",
            why=f"it would run {', '.join(code)}",
            fix="read that code, then pass --trust-remote-code; or name a tokenizer.json with "
            "--tokenizer",
        )
    return Diagnostic(
        "tokenizer-missing",
        f"no tokenizer in {path}",
        why=f"looked for {', '.join(_TOKENIZER_FILES)}",
        fix="download it, or name another directory with --tokenizer, or serve token ids only "
        "with --skip-tokenizer-init",
    )


def check_chat_template(path: str, given: str | None) -> list[Diagnostic]:
    """Without a template /v1/chat/completions cannot answer; completions can."""
    if given or _has_template(path):
        return []
    looked = ", ".join(("tokenizer_config.json", *_TEMPLATE_FILES, "additional_chat_templates/"))
    return [_no_template(path, looked)]


def check_gguf_template(path: str, given: str | None) -> list[Diagnostic]:
    """The same for a GGUF file, which keeps the template in its metadata."""
    try:
        has_template = bool(read_gguf_header(path).metadata.get("tokenizer.chat_template"))
    except ConfigError:
        return []
    return [] if given or has_template else [_no_template(path, "tokenizer.chat_template")]


def _no_template(path: str, looked: str) -> Diagnostic:
    return Diagnostic(
        "chat-template-missing",
        "/v1/chat/completions will refuse every request: the model has no chat template",
        why=f"looked for {looked}",
        where=path,
        fix="--chat-template FILE, or use /v1/completions",
        severity="warning",
    )


def _has_template(path: str) -> bool:
    if any(os.path.exists(os.path.join(path, n)) for n in _TEMPLATE_FILES):
        return True
    if os.path.isdir(os.path.join(path, "additional_chat_templates")):
        return True
    return bool(_read_json(os.path.join(path, "tokenizer_config.json")).get("chat_template"))


def _read_json(file: str) -> dict[str, Any]:
    """A JSON object, or {} where the file is absent or broken (others report that)."""
    try:
        with open(file, "rb") as handle:
            content = msgspec.json.decode(handle.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def check_host(num_local_ranks: int, max_num_seqs: int) -> list[Diagnostic]:
    """Shared memory and open files, as warnings: a container may still grant more."""
    findings = []
    if num_local_ranks > 1:
        findings += _check_shm(num_local_ranks)
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MIN_OPEN_FILES + 2 * max_num_seqs
    if resource.RLIM_INFINITY not in (soft, hard) and hard < needed:
        findings.append(
            Diagnostic(
                "open-files",
                f"this process may open {hard:,} files",
                why=f"{max_num_seqs} concurrent requests can take {needed:,}",
                fix=f"ulimit -n {needed}, or a smaller --max-num-seqs",
                severity="warning",
            )
        )
    return findings


def _check_shm(num_local_ranks: int) -> list[Diagnostic]:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return []
    free = stat.f_bavail * stat.f_frsize
    if free >= MIN_SHM_BYTES:
        return []
    return [
        Diagnostic(
            "shared-memory",
            f"/dev/shm has {free >> 20} MiB free",
            why=f"{num_local_ranks} ranks on this host exchange data through it and want "
            f"{MIN_SHM_BYTES >> 20} MiB",
            fix="docker run --ipc=host or --shm-size=1g",
            severity="warning",
        )
    ]


def check_torch(platform: str, driver_cuda: tuple[int, int] | None) -> list[Diagnostic]:
    """Can the installed torch drive these GPUs? Read from its version file, not imported."""
    if platform != "cuda" or (built_for := torch_cuda_version()) is None:
        return []
    if built_for == "none":
        return [
            Diagnostic(
                "torch-without-cuda",
                "the installed torch is a CPU build, the device is an NVIDIA GPU",
                why="torch/version.py names no CUDA version",
                fix="install a CUDA build of torch, or --device cpu",
                exit_code=ExitCode.HARDWARE,
            )
        ]
    major = int(built_for.split(".")[0])
    if driver_cuda is None or driver_cuda[0] >= major:
        return []
    return [
        Diagnostic(
            "driver-too-old",
            f"the NVIDIA driver supports CUDA {driver_cuda[0]}.{driver_cuda[1]}, torch is built "
            f"for {built_for}",
            why="a driver runs CUDA builds of its own major version and older ones",
            fix=f"update the driver, or install a torch built for CUDA {driver_cuda[0]}",
            exit_code=ExitCode.HARDWARE,
        )
    ]


def torch_cuda_version() -> str | None:
    """CUDA version that the installed torch is built for; "none" for a CPU or ROCm build,
    None where torch or its version file is not found."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda(?:\s*:[^=]+)?\s*=\s*(?:'([\d.]+)'|\"([\d.]+)\"|None)", text, re.M)
    if match is None:
        return None
    return match.group(1) or match.group(2) or "none"
