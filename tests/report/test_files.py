"""The report's files: of this run or of none, whole or not at all."""

from __future__ import annotations

import json

import pytest

from parity_audit.core.errors import NotJudged, UsageError
from parity_audit.report.files import failure_reported, set_aside


def test_an_earlier_report_is_set_aside(tmp_path):
    (tmp_path / "report.json").write_text("old")
    set_aside(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["previous-report.json"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(NotJudged("gone"), "not-judged"), (KeyboardInterrupt(), "interrupted"), (KeyError(1), "internal")],
)
def test_what_ends_a_run_is_its_report(tmp_path, error, code):
    with pytest.raises(type(error)), failure_reported("a-model", tmp_path):
        raise error
    written = json.loads((tmp_path / "report.json").read_text())

    assert (written["model"], written["error"]["code"], written["candidates"]) == ("a-model", code, [])
    assert written["exit_code"] == (130 if code == "interrupted" else 3)
    assert "nothing was judged" in (tmp_path / "report.txt").read_text().lower()


def test_a_malformed_question_leaves_nothing(tmp_path):
    with pytest.raises(UsageError), failure_reported("a-model", tmp_path):
        raise UsageError("what?")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_does_not_hide_the_cause(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotJudged, match="gone"), failure_reported("a-model", tmp_path / "file"):
        raise NotJudged("gone")
