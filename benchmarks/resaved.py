"""Checkpoints in a release's config form and as transformers saves them again: nobody is accused, faults are found in the candidate.

    python benchmarks/resaved.py --out resaved.json            # every architecture, both forms; what is in there is not run again
    python benchmarks/resaved.py --table resaved.json

In one model of every architecture a clean port, twice the rotary base, another rotary scaling and a norm's eps of 1e-3 are audited.
Right is: the clean port at parity without a finding; the constant named, alone, and the candidate said to depart from the spec. What
the spec makes of a changed constant is wrong with it: DeepSeek's scores are scaled by what the rotary scaling says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parity_audit
from parity_audit.cache.root import cache_root
from parity_audit.core.report import Candidate, Verdict
from parity_audit.selftest.corpus import Fault, corpus_folder, resolved
from parity_audit.specs import miniature
from parity_audit.specs.load import list_specs
from parity_audit.specs.resolve import ResolvedModel, resolve_model
from parity_audit.specs.view import spec_values
from parity_audit.specs.wrapped import text_config
from parity_audit.workers.live import lent

FORMS = ("mini", "resaved")
OTHER = {"rope_type": "linear", "factor": 4.0}
FIRST_NORMS = ("blocks.{l}.ln1.out", "blocks.{l}.ln1_post.out")
"""The first of a block; where none stands in front of the attention, the one behind it."""
OLDER = ("rope_theta", "rope_scaling", "rope_local_base_freq")
NAMES = {"clean": "", "theta": "rope.theta", "scaling": "rope.scaling", "eps": "norm.eps"}


def plants_of(known: ResolvedModel, path: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The plants that this architecture has a place for, by what they change."""
    import transformers

    yield "clean", []
    sites = known.spec.content.backends["hf"].sites
    norm = next(site for site in FIRST_NORMS if sites.get(site))
    fault = Fault(id="eps", plant=[{"op": "norm_eps", "module": f"@{norm}", "value": 1e-3}], knob="norm.eps")
    yield "eps", resolved(fault, known.spec)
    rope = getattr(transformers.AutoConfig.from_pretrained(path), "rope_parameters", None)
    if rope and "rope.theta" in known.spec.content.knobs and known.spec.content.knobs["rope.theta"]:
        yield (
            "theta",
            [
                {
                    "op": "config",
                    "rope_parameters": _each(rope, lambda own: {**own, "rope_theta": 2 * own["rope_theta"]}),
                }
            ],
        )
        yield "scaling", [{"op": "config", "rope_parameters": _each(rope, _rescaled)}]


def _each(rope: dict[str, Any], change: Any) -> dict[str, Any]:
    """Change the parameters, or those of every kind of layer."""
    if "rope_theta" in rope:
        return dict(change(dict(rope)))
    return {kind: change(dict(own)) if own else own for kind, own in rope.items()}


def _rescaled(own: dict[str, Any]) -> dict[str, Any]:
    if own.get("rope_type", "default") == "default":
        return {**own, **OTHER}
    kept = ("rope_theta", "partial_rotary_factor")
    return {"rope_type": "default", **{key: own[key] for key in kept if key in own}}


def audited(name: str, form: str) -> list[dict[str, Any]]:
    """One row per plant."""
    sys.path.insert(0, str(corpus_folder()))
    import plants

    known = resolve_model(name)
    path = miniature.make(known, size=form, root=cache_root() / "synthetic").path
    asked = dict(plants_of(known, path))
    with contextlib.ExitStack() as held, tempfile.TemporaryDirectory() as out:
        candidates = [held.enter_context(lent(plants.load(own, path, "float32", "cpu"))) for own in asked.values()]
        report = parity_audit.audit(
            name, candidates=candidates, miniature=form, probes=["short"], repair=False, out=Path(out) / "out"
        )
    return [
        {
            "model": name, "form": form, "plant": plant, "said": said(candidate),
            "right": right(names_of(known, path, plant, steps), candidate),
        }
        for (plant, steps), candidate in zip(asked.items(), report.candidates, strict=True)
    ]  # fmt: skip


def names_of(known: ResolvedModel, path: str, plant: str, steps: list[dict[str, Any]]) -> set[str]:
    """The constants that are wrong: the one that was changed, and those that the spec makes of it."""
    named = {NAMES[plant]} - {""}
    config = text_config(json.loads((Path(path) / "config.json").read_text()))
    before = spec_values(known.spec, config)
    for step in steps:
        if step["op"] == "config":  # in the form that transformers 5 writes, which older keys beside it would outvote
            kept = {key: value for key, value in config.items() if key not in OLDER}
            after = spec_values(known.spec, {**kept, "rope_parameters": step["rope_parameters"]})
            named |= {knob for knob, value in after.items() if value != before.get(knob)}
    return named


def right(expected: set[str], candidate: Candidate) -> bool:
    """Whether the answer is the one that was asked for."""
    if not expected:
        return candidate.verdict in (Verdict.EXACT, Verdict.PARITY) and not candidate.findings
    found = {(finding.knob, finding.departs_from_spec) for finding in candidate.findings}
    return candidate.verdict is Verdict.MISMATCH and found == {(knob, "candidate") for knob in expected}


def said(candidate: Candidate) -> str:
    """Verdict and findings in a line."""
    found = [
        f"{item.knob}={item.candidate_value} ({item.kind}, {item.departs_from_spec})" for item in candidate.findings
    ]
    return "; ".join([candidate.verdict.value, *found]) + str((candidate.error or {}).get("message", ""))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one row per model and form."""
    lines = [f"| model | config | {' | '.join(NAMES)} |", "|---" * (2 + len(NAMES)) + "|"]
    for model, form in dict.fromkeys((row["model"], row["form"]) for row in rows):
        of = {row["plant"]: row["right"] for row in rows if (row["model"], row["form"]) == (model, form)}
        marks = ["" if plant not in of else "yes" if of[plant] else "**no**" for plant in NAMES]
        lines.append(f"| `{model}` | {form} | {' | '.join(marks)} |")
    asked, good = len(rows), sum(row["right"] for row in rows)
    wrong = [f"- `{row['model']}` {row['form']} {row['plant']}: {row['said']}" for row in rows if not row["right"]]
    return "\n".join([*lines, "", f"{good} of {asked} right.", "", *wrong])


def main() -> int:
    """Audit what was asked for, keep every row as it comes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append")
    parser.add_argument("--form", action="append", choices=FORMS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    asked = parser.parse_args()
    if asked.table:
        print(table(json.loads(asked.table.read_text())))
        return 0
    rows: list[dict[str, Any]] = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else []
    there = {(row["model"], row["form"]) for row in rows}
    for name in asked.model or [spec.first_model for spec in list_specs()]:
        for form in asked.form or FORMS:
            if (name, form) in there:
                continue
            rows += audited(name, form)
            if asked.out:
                asked.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return int(not all(row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
