"""An audit held against an earlier one: bands of both directions, changed questions, and the series of a folder."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from report.sample import CLEAN, REPORT, WRONG
from typer.testing import CliRunner

from parity_audit.audit.baseline import BAND, with_baseline_comparison
from parity_audit.audit.reporting import tokens_hash
from parity_audit.cli.app import app
from parity_audit.core.errors import UsageError
from parity_audit.core.report import Report, Verdict
from parity_audit.core.types import Probe
from parity_audit.offline.history import history
from parity_audit.report.files import write_report
from parity_audit.report.terminal import render

PROBE = {"name": "short", "shape": [1, 48], "purpose": "everyday", "tokens": "aa"}
THEN = replace(REPORT, probes=(PROBE,), candidates=(CLEAN,), exit_code=0)


def moved(factor: float, figure: str = "noise_ratio") -> Report:
    """The report with one figure of its candidate multiplied."""
    logits = replace(CLEAN.logits, **{figure: getattr(CLEAN.logits, figure) * factor})
    return replace(THEN, candidates=(replace(CLEAN, logits=logits),))


def test_the_same_report_is_within_every_band():
    held = with_baseline_comparison(THEN, THEN)

    assert (held.exit_code, held.baseline.departures, held.baseline.changed_question) == (0, (), ())
    assert [figure.ratio for figure in held.baseline.figures] == [1.0] * 4


@pytest.mark.parametrize(("factor", "code"), [(3.9, 0), (1 / 3.9, 0), (4.1, 1), (1 / 4.1, 1)])
@pytest.mark.parametrize("figure", ["noise_ratio", "max_abs", "rmse", "rel"])
def test_a_figure_may_move_by_the_band_in_either_direction(factor, code, figure):
    held = with_baseline_comparison(moved(factor, figure), THEN)

    assert held.exit_code == code
    assert len(held.baseline.departures) == code
    assert ("better" if factor < 1 else "worse") in "".join(held.baseline.departures) or code == 0


def test_the_band_is_that_of_parity():
    assert BAND == 4.0


def test_a_figure_that_becomes_zero_has_left_its_band():
    held = with_baseline_comparison(moved(0.0), THEN)

    assert (held.exit_code, held.baseline.figures[3].ratio, held.baseline.figures[3].within) == (1, None, False)


def test_a_verdict_that_changes_departs_and_a_missing_candidate_too():
    worse = replace(THEN, candidates=(replace(CLEAN, verdict=Verdict.MISMATCH),), exit_code=1)

    assert with_baseline_comparison(worse, THEN).baseline.departures == (
        "vllm: parity became mismatch, which is worse",
    )
    missing = with_baseline_comparison(replace(THEN, candidates=(WRONG,), exit_code=1), THEN)
    assert missing.baseline.departures == (
        "vllm: was judged in the baseline, and not in this audit", "transformer_lens: is not in the baseline",
    )  # fmt: skip


def test_a_known_mismatch_stays_one():
    known = replace(THEN, candidates=(WRONG,), exit_code=1)

    assert with_baseline_comparison(known, known).exit_code == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"probes": ({**PROBE, "tokens": "bb"},)}, ("probe short",)),
        ({"probes": (PROBE, {**PROBE, "name": "long"})}, ("probe long",)),
        ({"probes": ({**PROBE, "tokens": None},)}, ("probe short",)),
        ({"weights": {"fingerprint": "other"}}, ("weights",)),
        ({"model": "other"}, ("model",)),
        ({"reference": replace(REPORT.reference, dtype="bfloat16")}, ("reference",)),
        ({"reference": replace(REPORT.reference, settings={})}, ("reference settings",)),
    ],
)
def test_another_question_is_no_regression_and_no_pass(changes, named):
    held = with_baseline_comparison(replace(moved(100.0), **changes), THEN)

    assert (held.exit_code, held.baseline.changed_question, held.baseline.figures) == (3, named, ())
    assert "another question" in render(held)


def test_another_release_is_the_same_question():
    newer = replace(
        THEN, candidates=(replace(CLEAN, version="0.33.0"),), reference=replace(REPORT.reference, version="5")
    )

    assert with_baseline_comparison(newer, THEN).exit_code == 0


def test_the_hash_of_a_probe_sees_tokens_mask_and_decoding():
    probe = Probe(name="p", purpose="", token_ids=((1, 2),), mask=((1, 1),))
    others = [replace(probe, token_ids=((1, 3),)), replace(probe, mask=((0, 1),)), replace(probe, decode_from=1)]

    assert tokens_hash(probe) == tokens_hash(replace(probe, name="q"))
    assert len({tokens_hash(one) for one in [probe, *others]}) == 4


def test_the_series_of_a_folder_has_ratios_to_the_one_before(tmp_path):
    for day, factor in (("03", 6.0), ("01", 1.0), ("02", 2.0)):
        made = replace(moved(factor), environment={"date": f"2026-11-{day}T00:00:00+00:00"})
        write_report(made, tmp_path / f"run-{day}")
    other = replace(moved(1.0), weights={"fingerprint": "new"}, environment={"date": "2026-11-04T00:00:00+00:00"})
    write_report(other, tmp_path / "run-04")
    entries = history(tmp_path)

    assert [entry.date[8:10] for entry in entries] == ["01", "02", "03", "04"]
    assert [entry.ratio for entry in entries] == [None, pytest.approx(2.0), pytest.approx(3.0), None]
    assert [entry.same_question for entry in entries] == [True, True, True, False]
    shown = CliRunner().invoke(app, ["history", str(tmp_path)])
    assert shown.exit_code == 0
    assert "other question" in shown.output
    assert len(json.loads(CliRunner().invoke(app, ["history", str(tmp_path), "--json"]).output)) == 4


def test_reports_that_did_not_record_their_tokens_have_no_ratio(tmp_path):
    unknown = tuple({**probe, "tokens": None} for probe in THEN.probes)
    for day in ("01", "02"):
        made = replace(THEN, probes=unknown, environment={"date": f"2026-11-{day}T00:00:00+00:00"})
        write_report(made, tmp_path / day)

    assert [(entry.ratio, entry.same_question) for entry in history(tmp_path)] == [(None, True), (None, False)]


def test_a_folder_without_reports_is_an_error(tmp_path):
    with pytest.raises(UsageError, match=r"no report\.json"):
        history(tmp_path)


def test_a_baseline_that_is_none_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "report.json").write_text("{}")
    asked = [
        "gpt2",
        "--miniature",
        "-c",
        "vllm",
        "--baseline",
        str(tmp_path / "report.json"),
        "--out",
        str(tmp_path / "o"),
    ]

    assert CliRunner().invoke(app, asked).exit_code == 2


@pytest.mark.engine
def test_the_command_holds_an_audit_against_its_own_earlier_report(tmp_path):
    words = ["gpt2", "--miniature", "-c", "hf,attn_implementation=sdpa", "--probe", "short", "--no-repair", "-q"]
    first = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "a")])
    base = str(tmp_path / "a" / "report.json")
    again = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "b"), "--baseline", base])
    other = CliRunner().invoke(app, [*words, "--probe", "one", "--out", str(tmp_path / "c"), "--baseline", base])
    told = json.loads((tmp_path / "b" / "report.json").read_text())["baseline"]

    assert (first.exit_code, again.exit_code, other.exit_code) == (0, 0, 3)
    assert [figure["ratio"] for figure in told["figures"]] == [1.0] * len(told["figures"]) != []
