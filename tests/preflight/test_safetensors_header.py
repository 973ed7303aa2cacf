# SPDX-License-Identifier: Apache-2.0
"""Every way a safetensors header can be wrong, and the near misses that are fine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.preflight.checkpoints import header_of, write_safetensors
from vllm.preflight.safetensors_header import HeaderError, read_header

TENSORS = {"a": ("BF16", [2, 3]), "b": ("F32", [5])}


def finding(path: Path) -> tuple[str, str, str]:
    with pytest.raises(HeaderError) as error:
        read_header(str(path))
    found = error.value.finding
    return found.code, found.subject, found.why


def with_header(path: Path, entries: object, data: bytes = b"") -> Path:
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_a_whole_file_gives_names_shapes_and_bytes(tmp_path: Path) -> None:
    infos = read_header(str(write_safetensors(tmp_path / "m.safetensors", TENSORS)))
    assert [(i.name, i.dtype, i.shape, i.num_bytes, i.file) for i in infos] == [
        ("a", "BF16", (2, 3), 12, "m.safetensors"),
        ("b", "F32", (5,), 20, "m.safetensors"),
    ]


def test_metadata_and_scalars_are_fine(tmp_path: Path) -> None:
    entries = {
        "__metadata__": {"format": "pt"},
        "s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    }
    (info,) = read_header(str(with_header(tmp_path / "m.safetensors", entries, b"\0" * 4)))
    assert info.shape == () and info.num_elements == 1


def test_the_safetensors_library_reads_what_we_accept(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = write_safetensors(tmp_path / "m.safetensors", TENSORS)
    with safe_open(path, framework="np") as file:
        assert {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()} == {  # noqa: SIM118
            i.name: i.shape for i in read_header(str(path))
        }


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (b"", "weights-empty", "0 bytes"),
        (b"abc", "weights-corrupt", "3 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "weights-lfs-pointer", ""),
        ((1 << 60).to_bytes(8, "little"), "weights-corrupt", "1,152,921,504,606,846,976"),
        ((50).to_bytes(8, "little") + b"{}", "weights-truncated", "byte 58"),
        ((3).to_bytes(8, "little") + b"{]}", "weights-corrupt", "malformed"),
        ((2).to_bytes(8, "little") + b"[]", "weights-corrupt", "Expected `object`"),
    ],
)
def test_a_broken_file_is_named_with_its_reason(
    tmp_path: Path, content: bytes, code: str, words: str
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    found = finding(path)
    assert found[0] == code
    assert "m.safetensors" in found[1]
    assert words in found[1] + found[2]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "BF16", "shape": [2]}, "data_offsets are needed"),
        ({"dtype": "BF16", "shape": [-2], "data_offsets": [0, 4]}, "shape [-2]"),
        ({"dtype": "BF16", "shape": [True], "data_offsets": [0, 2]}, "shape [True]"),
        ({"dtype": "BF17", "shape": [2], "data_offsets": [0, 4]}, "unknown dtype BF17"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [0, 5]}, "takes 4 bytes"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [2, 6]}, "starts at 2"),
        (7, "dtype, shape and data_offsets are needed"),
    ],
)
def test_a_wrong_entry_names_the_tensor(tmp_path: Path, entry: object, words: str) -> None:
    code, subject, why = finding(with_header(tmp_path / "m.safetensors", {"t": entry}, b"\0" * 9))
    assert code == "weights-corrupt" and "'t'" in subject and words in why


def test_one_missing_byte_is_a_truncated_file(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", TENSORS)
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size - 1)
    code, subject, why = finding(path)
    assert code == "weights-truncated" and "1 byte short" in subject and f"{size:,}" in why


def test_one_byte_too_many_is_told(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", TENSORS)
    with open(path, "ab") as file:
        file.write(b"\0")
    assert finding(path)[:2] == ("weights-corrupt", "m.safetensors is longer than its header says")


def test_no_byte_of_tensor_data_is_read(tmp_path: Path) -> None:
    """The data region lies beyond what this machine could read: 8 TiB of hole."""
    path = write_safetensors(tmp_path / "m.safetensors", {"huge": ("BF16", [1 << 21, 1 << 21])})
    (info,) = read_header(str(path))
    assert info.num_bytes == 1 << 43


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_no_mutation_of_a_header_gives_a_traceback(tmp_path: Path, data: st.DataObject) -> None:
    header, size = header_of(TENSORS)
    content = bytearray(header + bytes(size))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    path = tmp_path / "m.safetensors"
    path.write_bytes(content[: cut or None])
    try:
        read_header(str(path))
    except HeaderError as error:
        assert error.finding.code.startswith("weights-")
