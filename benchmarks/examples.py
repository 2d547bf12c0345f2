"""Make the worked examples of reports/examples again, with the commands that reports/README.md lists.

    python benchmarks/examples.py                    # all of them
    python benchmarks/examples.py gemma-2-2024       # one
    python benchmarks/examples.py --render           # no audit: the committed results in today's formats

An audit that finds what it should exits with 1; any other exit code than 0 and 1 leaves the committed example as it is.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from parity_audit.report import json
from parity_audit.report.files import write_report

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "reports" / "examples"
COMMAND = re.compile(r"^- `([\w.-]+)`: `parity-audit ([^`]+)`", re.MULTILINE)


def commands() -> dict[str, list[str]]:
    """Arguments of `parity-audit` by name of the example."""
    text = (ROOT / "reports" / "README.md").read_text()
    return {name: shlex.split(arguments) for name, arguments in COMMAND.findall(text)}


def render(name: str) -> None:
    """The committed result of one example in today's formats."""
    folder = EXAMPLES / name
    write_report(json.loads((folder / "report.json").read_text()), folder)


def remake(name: str, arguments: list[str]) -> int:
    """Run one example's command and keep its report. Returns the command's exit code."""
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run([sys.executable, "-m", "parity_audit", *arguments, "--quiet", "--out", out], check=False)
        if done.returncode in (0, 1):
            write_report(json.loads((Path(out) / "report.json").read_text()), EXAMPLES / name)
    return done.returncode


def main(names: list[str]) -> int:
    """0 when every example that was asked for was made."""
    known = commands()
    wanted = [name for name in names if name != "--render"] or list(known)
    failed: list[str] = []
    for name in wanted:
        if "--render" in names:
            render(name)
            continue
        print(f"{name}: parity-audit {shlex.join(known[name])}", flush=True)
        if remake(name, known[name]) not in (0, 1):
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else f"{len(wanted)} examples are up to date")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
