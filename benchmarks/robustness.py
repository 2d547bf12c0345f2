"""Bad inputs and injected faults, each with the outcome that it has to have: nothing green, nothing lost, nothing left behind.

    python benchmarks/robustness.py --out benchmarks/robustness.md

Refusals run in this process, through the console script's own entry. Misbehaving ports run as candidates of real audits, with a
clean one before and after them. What every case has to come to is written beside it, in `benchmarks/robust/`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from robust import command_lines, files, misbehaving
from robust.case import Case, Outcome, refused
from robust.table import page


def main() -> int:
    """Run everything; exit code 1 when a case did not come to what it has to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the Markdown table to write")
    parser.add_argument("--only", help="only cases of groups that begin so")
    parser.add_argument("--no-audits", action="store_true", help="only what has to be refused")
    asked = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"  # no case may depend on what the hub has
    started = time.perf_counter()
    outcomes = _refusals([case for case in (*command_lines.cases(), *files.cases()) if _wanted(case, asked.only)])
    if not asked.no_audits:
        for item in misbehaving.outcomes():
            print(f"{item.group}: {item.name}: {item.says} {item.wrong}", flush=True)
            outcomes.append(item)
    text = page(outcomes, time.perf_counter() - started)
    if asked.out is not None:
        asked.out.write_text(text)
    print(text.partition("\n## ")[0])
    wrong = [item for item in outcomes if item.wrong]
    for item in wrong:
        print(f"{item.group}: {item.name}: {item.wrong}")
    return 1 if wrong else 0


def _wanted(case: Case, only: str | None) -> bool:
    return only is None or case.group.startswith(only)


def _refusals(cases: Sequence[Case]) -> list[Outcome]:
    """Every case in an empty directory of its own."""
    found = []
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        for number, case in enumerate(cases):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            os.chdir(folder)
            found.append(refused(case, folder))
            print(f"{number + 1}/{len(cases)} {found[-1].group}: {case.name[:50]} {found[-1].wrong}", file=sys.stderr)
        os.chdir(here)
    return found


if __name__ == "__main__":
    sys.exit(main())
