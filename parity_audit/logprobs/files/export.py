"""Files that are written only where they are asked for, and what each needs to be installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from parity_audit.core.errors import UsageError
from parity_audit.core.logprob_report import LogprobReport, TokenTable
from parity_audit.logprobs.files.writing import write_parquet, write_workbook
from parity_audit.report.logprob_pictures import pictures
from parity_audit.report.pictures.export import png, standalone

NEEDS = {"xlsx": "openpyxl", "parquet": "pyarrow", "svg": None, "png": "resvg_py"}
"""Kinds of files, and the module that writes each; all of them come with the extra `export`."""


def check_exports(kinds: Sequence[str]) -> tuple[str, ...]:
    """The kinds, each once.

    Raises:
        UsageError: another kind, or one whose library is not installed.
    """
    for kind in kinds:
        if kind not in NEEDS:
            raise UsageError(f"nothing is written as `{kind}`", code="unknown-export", expected=", ".join(NEEDS))
        module = NEEDS[kind]
        if module is not None and find_spec(module) is None:
            raise UsageError(
                f"writing {kind} needs {module}", code="unknown-export", hint="pip install 'parity-audit[export]'"
            )
    return tuple(dict.fromkeys(kinds))


def export(report: LogprobReport, tokens: TokenTable, folder: Path, kinds: Sequence[str]) -> None:
    """Write tokens.xlsx, tokens.parquet and pictures/*.svg, *.png into the report's directory."""
    if "xlsx" in kinds:
        write_workbook(report, tokens, folder / "tokens.xlsx")
    if "parquet" in kinds:
        write_parquet(tokens, folder / "tokens.parquet")
    drawn = {"svg", "png"} & set(kinds)
    if drawn:
        (folder / "pictures").mkdir(exist_ok=True)
        for name, svg in pictures(report, tokens).items():
            path = folder / "pictures" / name
            if "svg" in drawn:
                path.with_suffix(".svg").write_text(standalone(svg), encoding="utf-8")
            if "png" in drawn:
                path.with_suffix(".png").write_bytes(png(svg))
