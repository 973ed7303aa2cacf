# SPDX-License-Identifier: Apache-2.0
"""Number formats: of activations on a device, of weights in a checkpoint."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from vllm.errors import Diagnostic, ExitCode
from vllm.platforms.host import has_bfloat16_instructions
from vllm.platforms.interface import DeviceCapability, Platform

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig


@dataclasses.dataclass(frozen=True)
class QuantizationMethod:
    """A way to store weights."""

    min_capability: DeviceCapability | None
    """Least compute capability with kernels for it anywhere; None: any device."""
    served_as: str | None
    """How this engine serves it; None: it does not."""


METHODS = {
    "gguf": QuantizationMethod(None, "dequantised on load"),
    "modelopt_fp4": QuantizationMethod(None, "Inkling's experts, dequantised on load"),
    "fp8": QuantizationMethod(DeviceCapability(8, 0), None),
    "fbgemm_fp8": QuantizationMethod(DeviceCapability(8, 0), None),
    "modelopt": QuantizationMethod(DeviceCapability(8, 9), None),
    "mxfp4": QuantizationMethod(DeviceCapability(8, 0), None),
    "awq": QuantizationMethod(DeviceCapability(7, 5), None),
    "awq_marlin": QuantizationMethod(DeviceCapability(7, 5), None),
    "gptq": QuantizationMethod(DeviceCapability(6, 0), None),
    "gptq_marlin": QuantizationMethod(DeviceCapability(7, 5), None),
    "compressed-tensors": QuantizationMethod(DeviceCapability(7, 5), None),
    "bitsandbytes": QuantizationMethod(DeviceCapability(7, 0), None),
}
# A repacking of the other's checkpoints, not another format.
_SAME = {"awq_marlin": "awq", "gptq_marlin": "gptq"}


def check_quantization(config: ModelConfig, platform: type[Platform]) -> list[Diagnostic]:
    """Resolve `config.quantization` against the checkpoint; findings for what cannot be served."""
    stored = checkpoint_method(config)
    asked = config.quantization
    if asked is not None and asked not in METHODS:
        return [
            Diagnostic(
                "quantization-unknown",
                f"--quantization {asked} is not known",
                why=f"known: {', '.join(METHODS)}",
                fix="leave --quantization out: the checkpoint says what it is",
                exit_code=ExitCode.USAGE,
            )
        ]
    if asked is not None and _SAME.get(asked, asked) != _SAME.get(stored or "", stored):
        return [_disagrees(asked, stored)]
    config.quantization = stored
    if stored is None:
        return []
    method = METHODS.get(stored)
    if method is None or method.served_as is None:
        return [_not_served(stored, method, platform)]
    if stored == "modelopt_fp4" and not config.architecture.startswith("Inkling"):
        return [_not_served(stored, None, platform)]
    return []


def checkpoint_method(config: ModelConfig) -> str | None:
    """What config.json or hf_quant_config.json say of the weights."""
    if config.is_gguf:
        return "gguf"
    block = config.hf_config.get("quantization_config") or config.hf_config.get(
        "compression_config"
    )
    if isinstance(block, dict):
        name = str(block.get("quant_method", "")).lower()
        is_fp4 = "FP4" in str(block.get("quant_algo", "")).upper()
        return "modelopt_fp4" if name == "modelopt" and is_fp4 else name or "unnamed"
    return _modelopt_file(config.model_path)


def _modelopt_file(path: str) -> str | None:
    file = os.path.join(path, "hf_quant_config.json")
    if not os.path.exists(file):
        return None
    from vllm.config.model_files import read_json_object

    block: Any = read_json_object(file).get("quantization")
    algorithm = str(block.get("quant_algo", "")) if isinstance(block, dict) else ""
    return "modelopt_fp4" if "FP4" in algorithm.upper() else "modelopt"


def _disagrees(asked: str, stored: str | None) -> Diagnostic:
    what = f"are stored as {stored}" if stored else "are not quantized"
    return Diagnostic(
        "quantization-mismatch",
        f"--quantization {asked} does not fit this checkpoint: its weights {what}",
        why="config.json and hf_quant_config.json name the format",
        fix="leave --quantization out, or use a checkpoint of that format",
    )


def _not_served(
    stored: str, method: QuantizationMethod | None, platform: type[Platform]
) -> Diagnostic:
    served = ", ".join(f"{n} ({m.served_as})" for n, m in METHODS.items() if m.served_as)
    why = f"it serves unquantized weights, {served}"
    least = method.min_capability if method else None
    if least is not None:
        for device in platform.devices():
            if device.capability is not None and device.capability < least:
                why += (
                    f"; and GPU {device.index}, {device.name} ({device.capability}), is below the "
                    f"{least} that {stored} needs in any engine"
                )
                break
    return Diagnostic(
        "quantization-unsupported",
        f"this engine has no kernels for {stored} weights",
        why=why,
        fix="use the unquantized checkpoint, or a GGUF file",
        exit_code=ExitCode.HARDWARE if "in any engine" in why else ExitCode.CONFIG,
    )


def automatic_dtype(stored: str, platform: type[Platform], is_gguf: bool) -> str:
    """`--dtype auto`: the checkpoint's format where the device is good at it.

    On the CPU bfloat16 stays where the processor multiplies it; float16 never does. GGUF
    files carry no activation format: float32 on the CPU, which is exact.
    """
    if platform.is_cpu():
        keeps = stored == "bfloat16" and has_bfloat16_instructions() and not is_gguf
        return "bfloat16" if keeps else "float32"
    if stored == "float32" or is_gguf:
        stored = "bfloat16"
    if stored == "bfloat16" and any(_lacks_bfloat16(d) for d in platform.devices()):
        return "float16"
    return stored if stored in ("bfloat16", "float16") else "bfloat16"


def check_dtype(config: ModelConfig, stored: str, platform: type[Platform]) -> list[Diagnostic]:
    """Findings for an explicit `--dtype`."""
    findings = []
    lacking = [d for d in platform.devices() if _lacks_bfloat16(d)]
    if config.resolved_dtype == "bfloat16" and lacking and not platform.is_cpu():
        device = lacking[0]
        findings.append(
            Diagnostic(
                "dtype-unsupported",
                f"{device.name} (compute capability {device.capability}) has no bfloat16",
                why="bfloat16 needs compute capability 8.0",
                where=f"GPU {device.index}",
                fix="--dtype half",
                exit_code=ExitCode.HARDWARE,
            )
        )
    if config.resolved_dtype == "float16" and config.architecture.startswith("Inkling"):
        findings.append(
            Diagnostic(
                "dtype-overflow",
                "Inkling cannot run in float16",
                why="activations of up to 69,307 were seen, float16 ends at 65,504",
                fix="--dtype bfloat16",
            )
        )
    elif config.resolved_dtype == "float16" and stored == "bfloat16":
        findings.append(
            Diagnostic(
                "dtype-overflow",
                "the model was trained in bfloat16, float16 may overflow",
                why="float16 ends at 65,504; a value beyond it fails its request",
                fix="--dtype bfloat16 where the device has it",
                severity="warning",
            )
        )
    return findings


def _lacks_bfloat16(device: Any) -> bool:
    return device.capability is not None and device.capability < (8, 0)
