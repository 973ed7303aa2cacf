# SPDX-License-Identifier: Apache-2.0
"""The files of a model directory: index against disk, names and shapes against the architecture."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preflight.checkpoints import write_index, write_safetensors
from vllm.preflight.files import compare_with_architecture, inspect_directory

A = {"a": ("BF16", [2, 3])}
B = {"b": ("F32", [5])}
EXPECTED = {"a": (2, 3), "b": (5,)}


def two_shards(directory: Path) -> None:
    write_safetensors(directory / "1.safetensors", A)
    write_safetensors(directory / "2.safetensors", B)
    write_index(directory, {"a": "1.safetensors", "b": "2.safetensors"})


def codes(directory: Path) -> list[tuple[str, str]]:
    return [(d.severity, d.code) for d in inspect_directory(str(directory)).findings]


def test_one_file_and_two_shards_are_clean(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    write_safetensors(tmp_path / "one" / "model.safetensors", A | B)
    two_shards(tmp_path / "two")
    for name, files in (("one", 1), ("two", 2)):
        inventory = inspect_directory(str(tmp_path / name))
        assert inventory.findings == [] and inventory.num_files == files
        assert compare_with_architecture(inventory, EXPECTED, (), "X") == []


def test_a_shard_that_the_index_names_but_nobody_has(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "2.safetensors").unlink()
    (found,) = inspect_directory(str(tmp_path)).findings
    assert found.code == "weights-shard-missing"
    assert "2.safetensors is not in" in found.subject
    assert "names 2 files, 1 are there" in found.why


def test_a_stray_shard_is_a_warning(tmp_path: Path) -> None:
    two_shards(tmp_path)
    write_safetensors(tmp_path / "3.safetensors", B)
    assert codes(tmp_path) == [("warning", "weights-stray-shard")]


def test_mistrals_consolidated_copy_is_neither_stray_nor_read(tmp_path: Path) -> None:
    two_shards(tmp_path)
    write_safetensors(tmp_path / "consolidated.safetensors", A | B)
    assert codes(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "truncated"),
        ("[]", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not a file of this directory"),
        ('{"weight_map": {"a": 3}}', "not a file of this directory"),
    ],
)
def test_a_broken_index_says_what_is_broken(tmp_path: Path, text: str, words: str) -> None:
    two_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    (found,) = (d for d in inspect_directory(str(tmp_path)).findings if d.severity == "error")
    assert found.code == "weights-index" and words in found.why


def test_an_index_of_another_revision(tmp_path: Path) -> None:
    two_shards(tmp_path)
    write_index(tmp_path, {"a": "1.safetensors", "c": "2.safetensors"})
    assert codes(tmp_path) == [("error", "weights-index")]
    write_index(tmp_path, {"a": "2.safetensors", "b": "1.safetensors"})
    assert codes(tmp_path) == [("warning", "weights-index")]


def test_no_weights_says_what_is_there_instead(tmp_path: Path) -> None:
    (found,) = inspect_directory(str(tmp_path)).findings
    assert found.code == "weights-missing" and "--load-format dummy" in found.fix
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin" in inspect_directory(str(tmp_path)).findings[0].why
    (tmp_path / "x.gguf").write_bytes(b"x")
    assert "x.gguf" in inspect_directory(str(tmp_path)).findings[0].fix


def test_one_broken_shard_says_that_the_others_are_whole(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "2.safetensors").write_bytes(b"")
    (found,) = inspect_directory(str(tmp_path)).findings
    assert found.code == "weights-empty" and "the other 1 shards are complete" in found.fix


def test_missing_renamed_and_unexpected_tensors(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": ("BF16", [2, 3]), "x.b": ("F32", [5])})
    inventory = inspect_directory(str(tmp_path))
    (missing,) = compare_with_architecture(inventory, EXPECTED, (), "X")
    assert missing.code == "tensor-missing"
    assert missing.subject == "1 of 2 tensors of X are not in the weights"
    assert "such as b; there are 1 others, such as x.b" in missing.why
    (extra,) = compare_with_architecture(inventory, {"a": (2, 3)}, (), "X")
    assert extra.code == "tensor-unexpected"
    assert compare_with_architecture(inventory, {"a": (2, 3)}, ("x.",), "X") == []
    assert compare_with_architecture(inventory, {"a": (2, 3)}, (".b",), "X") == []


def test_a_wrong_shape_gives_both(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", A | B)
    (found,) = compare_with_architecture(
        inspect_directory(str(tmp_path)), {"a": (3, 2), "b": (5,)}, (), "X"
    )
    assert found.code == "tensor-shape"
    assert found.subject == "a has shape [2, 3], config.json makes it [3, 2]"
    assert found.where == "model.safetensors"
