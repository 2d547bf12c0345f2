"""Audits, log-probabilities and invariance by one path: every format, files, cards and the table of all cards."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
import xmlschema
from sample import REPORT
from test_gate_formats import SCHEMAS, sarif_validator
from test_invariance import made as invariance_sample
from test_logprobs import EVIL
from test_logprobs import sample as logprob_sample
from typer.testing import CliRunner

from parity_audit import api
from parity_audit.cli.app import app
from parity_audit.core.card import Asked, Question
from parity_audit.core.invariance_report import Invariance
from parity_audit.core.jsonio import to_plain
from parity_audit.core.report import Verdict
from parity_audit.core.version import __version__
from parity_audit.logprobs.files.writing import read_tokens, write_tokens
from parity_audit.matrix.card_from_report import cards_of
from parity_audit.matrix.cards import read_cards, write_card
from parity_audit.matrix.cells import Matrix, cells
from parity_audit.matrix.command import Table
from parity_audit.matrix.command import rendered as table_text
from parity_audit.report.files import read_finished, set_aside, write_report
from parity_audit.report.matrix_content import TITLES
from parity_audit.report.schema import card_schema
from parity_audit.report.views import FILES, FORMATS, loaded, rendered, view_of

LOGPROBS, TOKENS = logprob_sample()
BROKEN = invariance_sample()
REPORTS = {"audit": REPORT, "logprobs": LOGPROBS, "invariance": BROKEN}
PRINTED = {"weights": {"source": "synthetic:mini", "fingerprint": "f"}}


def asked(question: Question, **more) -> Asked:
    return Asked(
        question=question, model="gpt2", candidate="vllm==0.32.0", reference="hf", synthetic="mini", seed=0, dtype="float32",
        device="cpu", probes=(), repair=True, program=__version__, **more,
    )  # fmt: skip


@pytest.mark.parametrize("name", REPORTS)
def test_every_kind_of_report_has_every_format(name):
    report = REPORTS[name]
    texts = {format: rendered(report, format, where="there") for format in FORMATS}

    assert loaded(texts["json"]) == report
    assert "there" in texts["terminal"]
    assert texts["html"].count("<script") == texts["html"].count("navigator.clipboard")
    assert "<script" not in texts["markdown"].replace("\\<", "")
    for schema in ("junit-ant.xsd", "junit-jenkins.xsd"):
        xmlschema.XMLSchema(str(SCHEMAS / schema)).validate(ElementTree.fromstring(texts["junit"]))
    sarif_validator().validate(json.loads(texts["sarif"]))
    assert 'message="' in texts["junit"]


@pytest.mark.parametrize("name", REPORTS)
def test_a_run_leaves_the_same_files_and_they_are_read_again(name, tmp_path):
    report = REPORTS[name]
    stem = view_of(report).stem
    path = write_report(report, tmp_path)

    assert {one.name for one in tmp_path.iterdir()} == {f"{stem}{ending}" for ending in FILES}
    assert read_finished(path) == report
    shown = CliRunner().invoke(app, ["show", str(path), "--format", "sarif"])
    assert (shown.exit_code, shown.output) == (0, rendered(report, "sarif"))
    set_aside(tmp_path, stem)
    assert {one.name for one in tmp_path.iterdir()} == {f"previous-{stem}{ending}" for ending in FILES}


def test_the_page_of_log_probabilities_has_its_pictures_wherever_it_is_drawn(tmp_path):
    write_report(LOGPROBS, tmp_path, TOKENS)
    write_tokens(TOKENS, tmp_path)
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "logprobs.json"), "--format", "html"])

    assert read_tokens(tmp_path) == TOKENS
    assert shown.output == (tmp_path / "logprobs.html").read_text()
    assert shown.output.count("<svg") == 5
    (tmp_path / "tokens.jsonl").unlink()
    assert "<svg" not in CliRunner().invoke(app, ["show", str(tmp_path / "logprobs.json"), "--format", "html"]).output


def test_every_kind_of_report_has_a_card():
    found = {
        question: cards_of(replace(REPORTS[question.value], **PRINTED), None, asked(question))[0] for question in Question
    }  # fmt: skip
    scored, followed = found[Question.LOGPROBS], found[Question.INVARIANCE]

    assert (scored.verdict, scored.findings[0].message) == (Verdict.MISMATCH, f"{EVIL} in {EVIL}: {EVIL}")
    assert scored.figures["rmse_dlogp"] == LOGPROBS.pairs[0].metrics["rmse_dlogp"]
    assert (followed.verdict, followed.said) == (Verdict.MISMATCH, "broken")
    assert followed.figures == {"ulp": 12.5, "nats": 0.25, "noise_ratio": 77.0}
    for card in found.values():
        jsonschema.validate(to_plain(card), card_schema())


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        (Invariance.BITWISE, Verdict.EXACT), (Invariance.CLASS_ONLY, Verdict.PARITY), (Invariance.NUMERIC, Verdict.PARITY),
        (Invariance.BROKEN, Verdict.MISMATCH), (Invariance.ERROR, Verdict.ERROR),
    ],
)  # fmt: skip
def test_the_card_of_invariance_says_its_own_word(said, verdict):
    (card,) = cards_of(invariance_sample(said), ["vllm==0.32.0"], asked(Question.INVARIANCE))
    assert (card.verdict, card.said) == (verdict, said.value)


def test_each_question_has_a_table_of_its_own(tmp_path):
    for question in Question:
        (card, *_) = cards_of(
            replace(REPORTS[question.value], candidates=REPORT.candidates[1:2], **PRINTED) if question is Question.AUDIT
            else replace(REPORTS[question.value], **PRINTED), ["vllm==0.32.0"], asked(question),
        )  # fmt: skip
        write_card(card, tmp_path)
    table = Table(
        cards=tuple(read_cards(tmp_path)), not_run=(asked(Question.INVARIANCE, options=("--quick",)),), exit_code=1
    )

    for format in ("terminal", "markdown", "html"):
        text = table_text(table, format)
        assert [title for title in TITLES.values() if title not in text] == []
        assert "broken 77x" in text or "broken</span> 77x" in text
        assert "--quick" in text


def test_log_probabilities_are_asked_of_engines_that_sample():
    matrix = Matrix(
        models=("gpt2",), candidates=("vllm", "transformer_lens"), questions=("logprobs", "invariance"), quick=True
    )
    found = [(one.question.value, one.candidate, one.options) for one in cells(matrix)]

    assert found == [
        ("logprobs", "vllm", ()), ("invariance", "vllm", ("--quick",)), ("invariance", "transformer_lens", ("--quick",))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "words", "options"),
    [
        (
            "logprobs",
            ["-e", "vllm==0.32.0", "--top-k", "5", "--no-prefix-cache"],
            ("--top-k", "5", "--no-prefix-cache"),
        ),
        ("invariance", ["-c", "vllm==0.32.0", "--quick"], ("--quick",)),
    ],
)
def test_a_command_keeps_a_card_with_its_own_words(name, words, options, tmp_path, monkeypatch):
    """The report is given in place of minutes of engines; the command line is real."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, name, lambda *_, **__: replace(REPORTS[name], model="gpt2", **PRINTED))
    done = CliRunner().invoke(app, [name, "gpt2", "--miniature", *words, "--card", "--format", "junit", "--out", "x"])
    (card,) = read_cards(Path("reports/cards"))

    assert done.output.startswith("<?xml")
    assert (card.asked.question.value, card.asked.candidate, card.asked.options) == (name, "vllm==0.32.0", options)
    assert shlex.split(card.command)[:3] == ["parity-audit", name, "gpt2"]
    assert card.command.endswith(shlex.join(options))
