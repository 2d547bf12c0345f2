"""Write the optional result files, and check that the packages that write them are installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from parity_audit.core.errors import UsageError
from parity_audit.core.logprob_report import LogprobReport, TokenTable
from parity_audit.logprobs.files.writing import write_parquet, write_workbook
from parity_audit.report.logprob_pictures import pictures
from parity_audit.report.pictures.export import png, standalone

MODULE_OF_KIND = {"xlsx": "openpyxl", "parquet": "pyarrow", "svg": None, "png": "resvg_py"}
"""Kinds of files and the module that writes each (None if none is needed); the extra `export` installs all of these modules."""


def check_exports(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds without duplicates.

    Raises:
        UsageError: a kind is unknown, or the module that writes it is not installed.
    """
    for kind in kinds:
        if kind not in MODULE_OF_KIND:
            raise UsageError(
                f"nothing is written as `{kind}`", code="unknown-export", expected=", ".join(MODULE_OF_KIND)
            )
        module = MODULE_OF_KIND[kind]
        if module is not None and find_spec(module) is None:
            raise UsageError(
                f"writing {kind} needs {module}", code="unknown-export", hint="pip install 'parity-audit[export]'"
            )
    return tuple(dict.fromkeys(kinds))


def export(report: LogprobReport, tokens: TokenTable, folder: Path, kinds: Sequence[str]) -> None:
    """Write the files of the given kinds (tokens.xlsx, tokens.parquet, pictures/*.svg, *.png) into the report's directory."""
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
