"""Writes a port file for each fault, which looks to the auditor like a researcher's own broken port."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parity_audit.selftest.corpus import Fault, corpus_folder, resolved

PLANTS = "plants.py"
PORT = '''# parity-audit: transformers may be imported before this file
"""A port with a planted fault."""
import plants
def load(model_path: str, dtype: str, device: str):
    return plants.load({operations!r}, model_path, dtype, device)
'''


HOOKED_PORT = '''# parity-audit: transformer_lens may be imported before this file
"""A port with a planted fault, made of transformer_lens."""
import plants
def load(model_path: str, dtype: str, device: str):
    return plants.load_hooked({operations!r}, {model!r}, dtype, device)
'''


def candidate_for(folder: Path, name: str, fault: Fault) -> str:
    """Return the BACKEND string of a fault: a port with its plants, or the backend release that has the fault by itself."""
    if fault.host and not fault.plant:
        return fault.host
    return write_port(folder, name, resolved(fault), model=fault.model, host=fault.host)


def write_port(
    folder: Path, name: str, operations: Sequence[dict[str, Any]], *, model: str = "", host: str = ""
) -> str:
    """Write a port with these operations and return its BACKEND string."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(corpus_folder() / PLANTS, folder / PLANTS)
    path = folder / f"{name}.py"
    path.write_text((HOOKED_PORT if host else PORT).format(operations=list(operations), model=model))
    return f"python:{path}:load" + (f",env={host}" if host else "")
