"""The planted-fault corpus on weights that are not random: trained here, or with the statistics of trained checkpoints.

    python benchmarks/trained.py --out trained
    python benchmarks/real_weights.py faults --trained trained --out trained.json   # about 25 faults in each of six models
    python benchmarks/real_weights.py faults --out real.json                        # the same in `--synthetic real`
    python benchmarks/real_weights.py clean --trained trained                       # clean ports, seeds 0 to 4
    python benchmarks/real_weights.py table trained.json real.json                  # Markdown

A fault that moves the logits of these weights by no more than another kernel does is none on them, and has to be at parity without a
finding.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trained import MODELS, directory

import parity_audit
from parity_audit.cache.root import cache_root
from parity_audit.core.report import Verdict
from parity_audit.selftest.corpus import Corpus, corpus_folder, load_corpus, resolved
from parity_audit.selftest.ports import candidate_for, write_port
from parity_audit.selftest.run import AT_ONCE, CLEAN, Result, run_corpus
from parity_audit.selftest.score import Score, score
from parity_audit.specs import miniature
from parity_audit.specs.resolve import ResolvedModel, resolve_model
from parity_audit.workers.live import lent

OTHER_KERNELS = [{"op": "einsum"}]
SEEN = 4.0
"""Times what other kernels do to the logits: the limit of parity."""
AT_PARITY = (Verdict.EXACT.value, Verdict.PARITY.value)
SEEDS = range(5)
PROBES = ("short", "repeated", "ragged", "left_padded", "decode")


def chosen(models: Sequence[str], at_most: int) -> Corpus:
    """The faults that short probes show in a transformers model, evenly picked where a model has more than `at_most`."""
    by_model = {}
    for model, faults in load_corpus(models).by_model.items():
        usable = [fault for fault in faults if not fault.long and not fault.host]
        count = min(at_most, len(usable))
        by_model[model] = tuple(usable[number * len(usable) // count] for number in range(count))
    return Corpus(by_model=by_model)


def unseen(corpus: Corpus, folder: Path | None) -> list[str]:
    """Ids of faults that are none on these weights."""
    import torch

    sys.path.insert(0, str(corpus_folder()))
    from test_plants import apart, logits, own_functions, plants
    from transformers.utils import logging

    logging.disable_progress_bar()
    found = []
    for model, faults in corpus.by_model.items():
        known = resolve_model(model)
        path = folder / directory(model) if folder else _real(known)

        def of(plant: list[dict[str, Any]], path: Path = path) -> torch.Tensor:
            made = plants.load(plant, str(path), "float32", "cpu")
            return logits(made, min(500, made.config.vocab_size))

        clean = of([])
        rounding = apart(clean, of(OTHER_KERNELS))
        kind = type(plants.load([], str(path), "float32", "cpu"))
        for fault in faults:
            with own_functions(kind):
                moved = apart(clean, of(resolved(fault, known.spec)))
            if moved <= SEEN * rounding and not any(step.get("decoded") for step in fault.plant):
                found.append(fault.id)
    return found


def faults(asked: argparse.Namespace) -> int:
    """Run the corpus on one kind of weights and keep the answers."""
    corpus = chosen(asked.model, asked.at_most)
    corpus = corpus.only(asked.only) if asked.only else corpus
    weights = {model: asked.trained / directory(model) for model in corpus.by_model} if asked.trained else {}

    def keep(result: Result, none: Sequence[str] = ()) -> None:
        content = {
            "kind": "trained" if asked.trained else "real", "unseen": none, "repair": not asked.no_repair, "seconds": result.seconds,
            "scores": [dataclasses.asdict(_not_asked(entry) if entry.id in none else entry) for entry in result.scores],
        }  # fmt: skip
        asked.out.write_text(json.dumps(content, indent=1) + "\n")

    if asked.no_repair:
        result = in_this_process(corpus, weights, keep)
    else:
        result = run_corpus(corpus, synthetic="real", weights=weights, keep=keep)
    silent = [
        entry.id
        for entry in result.scores
        if entry.verdict in AT_PARITY and entry.named is not None and not entry.found
    ]
    keep(result, unseen(corpus.only(silent), asked.trained) if silent else ())
    print(table([asked.out]))
    return 0


def _not_asked(entry: Score) -> Score:
    """A plant that is no fault on these weights, and of which nothing was said."""
    return dataclasses.replace(entry, detected=True, named=None, valued=None, layers=None, placed=None, extent=None)


def in_this_process(corpus: Corpus, weights: dict[str, Path], keep: Callable[[Result], None]) -> Result:
    """Every fault as a loaded model, which spares a process each; nothing is repaired."""
    sys.path.insert(0, str(corpus_folder()))
    import plants

    scores: list[Score] = []
    done, started = Result(scores=(), seconds=0.0), time.perf_counter()
    for model, faults in corpus.by_model.items():
        known = resolve_model(model)
        folder = weights.get(model) or _real(known)
        all_faults = [
            CLEAN.model_copy(update={"id": f"{model} clean", "model": model, "plant": OTHER_KERNELS}),
            *faults,
        ]
        for start in range(0, len(all_faults), AT_ONCE):
            group = all_faults[start : start + AT_ONCE]
            with contextlib.ExitStack() as held, tempfile.TemporaryDirectory() as out:
                candidates: list[Any] = []
                for number, fault in enumerate(group):
                    if any(
                        step["op"] == "rotary" for step in fault.plant
                    ):  # these change functions of the whole process
                        candidates.append(candidate_for(Path(out) / "ports", f"fault_{number}", fault, known.spec))
                        continue
                    made = plants.load(resolved(fault, known.spec), str(folder), "float32", "cpu")
                    candidates.append(held.enter_context(lent(made)))
                report = parity_audit.audit(
                    model, candidates=candidates, miniature=None if model in weights else "real",
                    weights=weights.get(model), probes=PROBES, repair=False, out=Path(out) / "out",
                )  # fmt: skip
            scores += [score(fault, candidate) for fault, candidate in zip(group, report.candidates, strict=True)]
            keep(done := Result(scores=tuple(scores), seconds=time.perf_counter() - started))
    return done


def _real(known: ResolvedModel) -> Path:
    return Path(miniature.make(known, size="real", root=cache_root() / "synthetic").path)


def clean(asked: argparse.Namespace) -> int:
    """Clean ports by other kernels and in other engines; 1 where one is accused."""
    accused = total = 0
    for model in asked.model:
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                port = write_port(Path(folder) / "ports", "other_kernels", OTHER_KERNELS)
                weights = asked.trained / directory(model) if asked.trained else None
                report = parity_audit.audit(
                    model, candidates=[port, *asked.candidate], miniature=None if weights else "real", weights=weights,
                    seed=seed, probes=PROBES, repair=False, out=Path(folder) / "out",
                )  # fmt: skip
            for candidate in report.candidates:
                right = candidate.verdict in (Verdict.EXACT, Verdict.PARITY) and not candidate.findings
                total, accused = total + 1, accused + (not right)
                said = ", ".join(f"{finding.knob} {finding.kind}" for finding in candidate.findings)
                print(
                    f"{model} {seed} {candidate.backend} {candidate.verdict.value} {candidate.why} {said}", flush=True
                )
    print(f"{total} clean ports, {accused} accused")
    return int(accused > 0)


def table(files: Sequence[Path]) -> str:
    """Markdown: one row per kind and model, and the faults with a wrong answer."""
    rows = [
        "| weights | model | faults | named | findings too many | repaired | clean accused |",
        "|---|---|---|---|---|---|---|",
    ]
    wrong = []
    for file in files:
        content = json.loads(file.read_text())
        for model in dict.fromkeys(entry["model"] for entry in content["scores"]):
            of = [entry for entry in content["scores"] if entry["model"] == model]
            planted = [entry for entry in of if entry["named"] is not None]
            harmless = [entry for entry in of if entry["named"] is None]
            mended = [entry["repaired"] for entry in planted if content["repair"] and entry["repaired"] is not None]
            rows.append(
                f"| {content['kind']} | `{model}` | {len(planted)} | {sum(entry['named'] for entry in planted)} "
                f"| {sum(len(entry['false_alarms']) for entry in planted)} "
                f"| {f'{sum(mended)} of {len(mended)}' if mended else '-'} "
                f"| {sum(not entry['detected'] or bool(entry['found']) for entry in harmless)} of {len(harmless)} |"
            )
            wrong += [_wrong(content["kind"], entry) for entry in of if _is_wrong(entry)]
    return "\n".join([*rows, "", *wrong])


def _is_wrong(score: dict[str, Any]) -> bool:
    if score["named"] is None:
        return not score["detected"] or bool(score["found"])
    return not score["named"] or bool(score["false_alarms"]) or score["valued"] is False


def _wrong(kind: str, entry: dict[str, Any]) -> str:
    parts = [key for key in ("detected", "named", "valued") if entry[key] is False]
    too_many = f", too many: {'; '.join(entry['false_alarms'])}" if entry["false_alarms"] else ""
    found = "; ".join(entry["found"])
    return f"- {kind} `{entry['id']}` {entry['verdict']}: not {', '.join(parts) or '-'}{too_many}; found {found} {entry['error']}"


def main() -> int:
    """Do what was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "clean", "table"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument(
        "--trained", type=Path, help="a directory that trained.py wrote; without it, `--synthetic real`"
    )
    parser.add_argument("--model", action="append", help="any of the corpus; six by default, `all` of them")
    parser.add_argument("--at-most", type=int, default=30, help="faults per model")
    parser.add_argument(
        "--no-repair", action="store_true", help="diagnose only, all models in this process: much cheaper"
    )
    parser.add_argument("--only", action="append", help="the fault of this id")
    parser.add_argument("-c", "--candidate", action="append", default=[], help="a BACKEND beside the clean port")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.model = list(load_corpus(()).by_model) if asked.model == ["all"] else asked.model or list(MODELS)
    if asked.what == "table":
        print(table(asked.files))
        return 0
    return faults(asked) if asked.what == "faults" else clean(asked)


if __name__ == "__main__":
    sys.exit(main())
