"""The first lines of a worked example as a terminal shows them, as an SVG that asks no network for a font.

python benchmarks/screenshot.py gemma-2-2024 docs/images/gemma-2-2024.svg --lines 34
"""

from __future__ import annotations

import argparse
import re
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from parity_audit.report import json
from parity_audit.report.terminal import WIDTH, render

EXAMPLES = Path(__file__).resolve().parents[1] / "reports" / "examples"
FONTS = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", help="a folder of reports/examples")
    parser.add_argument("out", type=Path, help="the SVG file")
    parser.add_argument("--lines", type=int, default=40, help="how many lines of the report")
    asked = parser.parse_args()
    report = json.loads((EXAMPLES / asked.example / "report.json").read_text())
    lines = render(report, colour=True).splitlines()[: asked.lines]
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join(lines)))
    asked.out.write_text(
        console.export_svg(title="parity-audit", code_format=FONTS.sub("", CONSOLE_SVG_FORMAT), unique_id="report")
    )


if __name__ == "__main__":
    main()
