# SPDX-License-Identifier: Apache-2.0
"""mkdocs asks this hook for the pages that are made from the code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.docs.generate import pages


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site's files."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
