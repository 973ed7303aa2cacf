# SPDX-License-Identifier: Apache-2.0
"""Are the weights there, whole, and those of this architecture? Headers only."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from vllm.errors import Diagnostic
from vllm.preflight.safetensors_header import HeaderError, TensorInfo, read_header

INDEX = "model.safetensors.index.json"
_EXAMPLES = 3


@dataclasses.dataclass
class WeightInventory:
    """Tensors found in a checkpoint's headers, and what is wrong with its files."""

    tensors: dict[str, TensorInfo] = dataclasses.field(default_factory=dict)
    findings: list[Diagnostic] = dataclasses.field(default_factory=list)
    num_files: int = 0

    @property
    def complete(self) -> bool:
        """Whether every file could be read, so that a tensor not listed is really absent."""
        return not any(d.severity == "error" for d in self.findings)


def inspect_directory(path: str) -> WeightInventory:
    """Inventory of the safetensors files of a model directory, its index included."""
    inventory = WeightInventory()
    names = sorted(n for n in os.listdir(path) if n.endswith(".safetensors"))
    index = _read_index(path, inventory)
    if index is not None:
        shards = sorted(set(index.values()))
        inventory.findings += _shard_findings(path, shards, names)
        wanted = [n for n in shards if n in names]
    else:
        wanted = _without_consolidated(names)
    if not wanted and inventory.complete:
        inventory.findings.append(_no_weights(path))
    ggufs = sorted(n for n in os.listdir(path) if n.endswith(".gguf"))
    if wanted and ggufs:
        inventory.findings.append(_two_formats(path, ggufs))
    broken = _read_shards(path, wanted, inventory)
    if index is not None and not broken:
        inventory.findings += _index_mismatch(index, inventory)
    return inventory


def lacks_files(path: str) -> bool:
    """Whether a directory has no weights yet, or not all that its index names."""
    present = [n for n in os.listdir(path) if n.endswith(".safetensors")]
    index = _read_index(path, WeightInventory())
    return not present if index is None else not set(index.values()) <= set(present)


def _two_formats(path: str, ggufs: list[str]) -> Diagnostic:
    return Diagnostic(
        "weights-two-formats",
        f"{_some(ggufs)} will not be read",
        why="safetensors files are there, too, and come first",
        where=path,
        fix=f"name {os.path.join(path, ggufs[0])} to serve that file",
        severity="warning",
    )


def _read_index(path: str, inventory: WeightInventory) -> dict[str, str] | None:
    file = os.path.join(path, INDEX)
    if not os.path.exists(file):
        return None
    try:
        with open(file, "rb") as handle:
            content = msgspec.json.decode(handle.read())
        weight_map = content["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise KeyError("weight_map")
        for tensor, shard in weight_map.items():
            if not isinstance(shard, str) or os.path.basename(shard) != shard or not shard:
                raise ValueError(f"{tensor} is mapped to {shard!r}, not a file of this directory")
        return weight_map
    except OSError as error:
        why = error.strerror or str(error)
    except (KeyError, TypeError):
        why = "it has no weight_map from tensor names to files"
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        why = str(error)
    inventory.findings.append(
        Diagnostic(
            "weights-index", f"{INDEX} cannot be used", why=why, fix="download the file again"
        )
    )
    return None


def _without_consolidated(names: list[str]) -> list[str]:
    """Drop Mistral's consolidated copies where the same weights are there once more."""
    others = [n for n in names if not n.startswith("consolidated")]
    return others or names


def _shard_findings(path: str, shards: list[str], present: list[str]) -> list[Diagnostic]:
    findings = []
    missing = [s for s in shards if s not in present]
    if missing:
        findings.append(
            Diagnostic(
                "weights-shard-missing",
                f"{_some(missing)} {'are' if len(missing) > 1 else 'is'} not in {path}",
                why=f"{INDEX} names {len(shards)} files, {len(shards) - len(missing)} are there",
                fix="download the missing files",
            )
        )
    stray = [n for n in _without_consolidated(present) if n not in shards]
    if stray and len(stray) < len(present):
        findings.append(
            Diagnostic(
                "weights-stray-shard",
                f"{_some(stray)} will not be read",
                why=f"{INDEX} does not name {'them' if len(stray) > 1 else 'it'}",
                fix="remove the file, or the index if it is out of date",
                severity="warning",
            )
        )
    return findings


def _read_shards(path: str, names: list[str], inventory: WeightInventory) -> bool:
    """Fill the inventory from each file's header; True if a file is broken."""
    errors = []
    for name in names:
        try:
            infos = read_header(os.path.join(path, name))
        except HeaderError as error:
            errors.append(error.finding)
            continue
        inventory.num_files += 1
        for info in infos:
            inventory.tensors[info.name] = info
    if errors and inventory.num_files:
        others = f"; the other {inventory.num_files} shards are complete"
        errors = [dataclasses.replace(e, fix=e.fix + others) for e in errors]
    inventory.findings += errors
    return bool(errors)


def _index_mismatch(index: dict[str, str], inventory: WeightInventory) -> list[Diagnostic]:
    wrong = [
        tensor
        for tensor, shard in index.items()
        if (info := inventory.tensors.get(tensor)) is not None and info.file != shard
    ]
    absent = [t for t in index if t not in inventory.tensors]
    findings = []
    if absent and inventory.complete:
        findings.append(
            Diagnostic(
                "weights-index",
                f"{INDEX} names {len(absent)} tensors that its files do not hold",
                why=f"such as {_some(absent)}",
                fix="download the index and its files from one revision",
            )
        )
    if wrong:
        findings.append(
            Diagnostic(
                "weights-index",
                f"{INDEX} maps {len(wrong)} tensors to other files than hold them",
                why=f"such as {_some(wrong)}",
                fix="nothing to do if the files are of one revision; they are read as they are",
                severity="warning",
            )
        )
    return findings


def _no_weights(path: str) -> Diagnostic:
    present = os.listdir(path)
    pickled = sorted(n for n in present if n.endswith((".bin", ".pt", ".pth")))
    ggufs = sorted(n for n in present if n.endswith(".gguf"))
    why = "no *.safetensors file is there"
    fix = "download the weights, or --load-format dummy for random ones"
    if ggufs:
        fix = f"name the GGUF file itself: {os.path.join(path, ggufs[0])}"
    elif pickled:
        why = f"only pickled weights are there ({_some(pickled)}), which this engine does not load"
        fix = "convert them to safetensors, or use a repository that has them"
    return Diagnostic("weights-missing", f"no weights in {path}", why=why, fix=fix)


def compare_with_architecture(
    inventory: WeightInventory,
    expected: Mapping[str, tuple[int, ...]],
    optional: Iterable[str],
    architecture: str,
    source: str = "config.json",
) -> list[Diagnostic]:
    """Names and shapes against what `architecture` needs.

    `expected` maps a tensor's name to its shape as `source` makes it; `optional` holds names
    or prefixes of tensors that may be present without being read.
    """
    prefixes = tuple(optional)
    missing = [n for n in expected if n not in inventory.tensors]
    unexpected = [
        n for n in inventory.tensors if n not in expected and not _is_optional(n, prefixes)
    ]
    findings = []
    if missing:
        findings.append(_missing_tensors(missing, unexpected, expected, architecture, source))
    elif unexpected:
        findings.append(
            Diagnostic(
                "tensor-unexpected",
                f"the weights hold {len(unexpected)} tensors that {architecture} does not have",
                why=f"such as {_some(sorted(unexpected))}",
                fix=f"check that {source} and the weights are of one model",
            )
        )
    findings += _shape_findings(inventory, expected, source)
    return findings


def _is_optional(name: str, optional: tuple[str, ...]) -> bool:
    return any(name == o or name.startswith(o) or name.endswith(o) for o in optional)


def _missing_tensors(
    missing: list[str],
    unexpected: list[str],
    expected: Mapping[str, Any],
    architecture: str,
    source: str,
) -> Diagnostic:
    why = f"such as {_some(sorted(missing))}"
    if len(unexpected) >= len(missing):
        why += f"; there are {len(unexpected)} others, such as {_some(sorted(unexpected))}"
    return Diagnostic(
        "tensor-missing",
        f"{len(missing)} of {len(expected)} tensors of {architecture} are not in the weights",
        why=why,
        fix=f"check that {source} and the weights are of one model and complete",
    )


def _shape_findings(
    inventory: WeightInventory, expected: Mapping[str, tuple[int, ...]], source: str
) -> list[Diagnostic]:
    wrong = [
        (info, tuple(shape))
        for name, shape in expected.items()
        if (info := inventory.tensors.get(name)) is not None and info.shape != tuple(shape)
    ]
    if not wrong:
        return []
    info, shape = wrong[0]
    return [
        Diagnostic(
            "tensor-shape",
            f"{info.name} has shape {list(info.shape)}, {source} makes it {list(shape)}",
            why=f"{len(wrong)} tensor{'s differ' if len(wrong) > 1 else ' differs'}",
            where=info.file,
            fix=f"check that {source} and the weights are of one model",
        )
    ]


def _some(names: list[str]) -> str:
    """At most three names in words."""
    shown = ", ".join(names[:_EXAMPLES])
    rest = len(names) - _EXAMPLES
    return f"{shown} and {rest} more" if rest > 0 else shown
