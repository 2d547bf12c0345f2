"""The table of outcomes, as Markdown."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from collections.abc import Sequence

from robust.case import Outcome

HEAD = """# Robustness

`{command}`

{count} bad inputs and injected faults, each with the outcome that it has to have: {right} came to it. Python {python}, {seconds:.0f} s.

| what must not be | cases |
|---|---|
| false green: exit 0, `parity` or `exact` | {green} |
| a result of another candidate lost | {lost} |
| `error[internal]` | {internal} |
| traceback on the terminal | {traceback} |
| process left behind | {orphans} |
| over the limit of time or memory | {over} |
"""


def page(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Totals first, then every case by group."""
    text = HEAD.format(
        command=" ".join(["python", *sys.argv]), count=len(outcomes), right=sum(not item.wrong for item in outcomes), python=platform.python_version(), seconds=seconds,
        green=sum(bool(item.wrong) and (item.exit == 0 or item.says in ("parity", "exact")) for item in outcomes),
        lost=_saying(outcomes, "lost"), internal=sum(item.says == "internal" for item in outcomes),
        traceback=_saying(outcomes, "traceback"), orphans=_saying(outcomes, "left behind"),
        over=sum(any(word in item.wrong for word in (" s", "memory", "hang")) for item in outcomes),
    )  # fmt: skip
    for group, count in Counter(item.group for item in outcomes).items():
        text += f"\n## {group} ({count})\n\n| case | exit | error or verdict | wrong |\n|---|---|---|---|\n"
        text += "".join(_row(item) for item in outcomes if item.group == group)
    return text


def _saying(outcomes: Sequence[Outcome], word: str) -> int:
    return sum(word in item.wrong for item in outcomes)


def _row(item: Outcome) -> str:
    name = json.dumps(item.name, ensure_ascii=False)[1:-1].replace("|", "\\|").replace("`", "'")
    return f"| `{name}` | {item.exit} | {item.says} | {item.wrong} |\n"
