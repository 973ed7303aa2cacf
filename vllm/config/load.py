# SPDX-License-Identifier: Apache-2.0
"""Where weights come from."""

from __future__ import annotations

import dataclasses

from vllm.config.fields import check_values, option, raise_usage


@dataclasses.dataclass
class LoadConfig:
    """Loading."""

    load_format: str = option("auto", choices=("auto", "safetensors", "gguf", "dummy"))
    """Format of the weights; dummy: random values, for measurements."""
    download_dir: str | None = None
    """Hub cache to use in place of the default one."""
    use_tqdm_on_load: bool = True
    """Show progress while weights are read, where stderr is a terminal."""

    def __post_init__(self) -> None:
        raise_usage(check_values(self))
