"""A port file for each fault: what a researcher's own broken port would look like to the auditor."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parity_audit.selftest.corpus import corpus_folder

PLANTS = "plants.py"
PORT = '''"""A port with a planted fault."""
import plants
def load(model_path: str, dtype: str, device: str):
    return plants.load({operations!r}, model_path, dtype, device)
'''


def write_port(folder: Path, name: str, operations: Sequence[dict[str, Any]]) -> str:
    """Write a port with these operations and return its BACKEND string."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(corpus_folder() / PLANTS, folder / PLANTS)
    path = folder / f"{name}.py"
    path.write_text(PORT.format(operations=list(operations)))
    return f"python:{path}:load"
