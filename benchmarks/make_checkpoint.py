# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint of a well-known shape with random weights, for benchmarks.

    python benchmarks/make_checkpoint.py qwen3-0.6b /tmp/qwen3-0.6b
    python benchmarks/make_checkpoint.py llama-8b /tmp/llama-8b --no-weights

With --no-weights only config and tokenizer are written; serve it with --load-format dummy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "head_dim": 128,
    "vocab_size": 151936,
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "5m": {
        **LLAMA,
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "smollm2-135m": {
        **LLAMA,
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "dtype": "float32",
    },
    "qwen3-0.6b": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **LLAMA,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        **QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # The first 8 of Inkling-Small's 42 layers: 2 dense, 6 sparse; 7 local, 1 global.
    "inkling-small-8": {
        "architectures": ["InklingForCausalLM"],
        "model_type": "inkling_text",
        "hidden_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "swa_num_attention_heads": 32,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 128,
        "sliding_window_size": 512,
        "rel_extent": 1024,
        "d_rel": 16,
        "local_layer_ids": [0, 1, 2, 3, 4, 6, 7],
        "intermediate_size": 16384,
        "moe_intermediate_size": 2048,
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "route_scale": 8.0,
        "logits_mup_width_multiplier": 16.0,
        "vocab_size": 201024,
        "unpadded_vocab_size": 200058,
        "conv_kernel_size": 4,
        "log_scaling_n_floor": 128000,
        "log_scaling_alpha": 0.1,
        "max_position_embeddings": 1048576,
        "eos_token_id": 200006,
        "dtype": "bfloat16",
    },
}
SHARD_BYTES = 4 << 30
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_checkpoint(shape: str, path: Path, with_weights: bool = True, seed: int = 0) -> None:
    """A directory as a hub would give it, of one of `SHAPES`."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"bos_token_id": 0, "eos_token_id": 2, **SHAPES[shape]}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(path, config["vocab_size"], config["max_position_embeddings"])
    if with_weights:
        write_weights(path, config, seed)


def write_weights(path: Path, config: dict[str, Any], seed: int) -> None:
    """Random tensors, in files of about 4 GiB with an index."""
    from safetensors.torch import save_file

    weight_map: dict[str, int] = {}
    files, total = [], 0
    for tensors in _shards(config, seed):
        file = path / f"shard-{len(files)}.part"
        save_file(tensors, file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, len(files)))
        total += sum(tensor.nbytes for tensor in tensors.values())
        files.append(file)
    if len(files) == 1:
        files[0].rename(path / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for file, name in zip(files, names, strict=True):
        file.rename(path / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {tensor: names[number] for tensor, number in weight_map.items()},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shards(config: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    import torch

    from vllm.loader.dummy import dummy_source
    from vllm.models.layouts import expected_tensors

    shapes = expected_tensors(config, config["architectures"][0])
    dtype = getattr(torch, config["dtype"])
    shard: dict[str, Any] = {}
    for name, tensor in dummy_source(shapes, seed, dtype, torch.device("cpu")).tensors():
        shard[name] = tensor
        if sum(t.nbytes for t in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def write_tokenizer(path: Path, vocab_size: int, max_length: int) -> None:
    """A byte-level BPE in which every id has a text; most of them no text gives."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [f"\u0120word{i}" for i in range(vocab_size - len(tokens))]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[0],
        "eos_token": special[2],
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("path", type=Path)
    parser.add_argument("--no-weights", action="store_true", help="for --load-format dummy")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_checkpoint(arguments.shape, arguments.path, not arguments.no_weights, seed=arguments.seed)


if __name__ == "__main__":
    main()
