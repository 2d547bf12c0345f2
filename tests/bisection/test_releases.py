"""A bisection on real releases of TransformerLens: 2.3.1 repaired the attention scale of Gemma-2."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from parity_audit.cli.app import app
from parity_audit.envs.releases import releases_between

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


def test_the_release_that_repaired_the_scale_of_gemma_2_is_named(tmp_path):
    args = [
        "bisect",
        "gemma-2-2b-it",
        "-c",
        "transformer_lens",
        "--good",
        "2.3.1",
        "--bad",
        "2.3.0",
        "--out",
        str(tmp_path),
    ]
    done = CliRunner().invoke(app, [*args, "--json"])
    (change,) = json.loads(done.output)["changes"]

    assert done.exit_code == 0
    assert (change["fault"], change["kind"], change["release"], change["before"]) == (
        "attention.scale", "repaired", "2.3.1", "2.3.0"
    )  # fmt: skip
    assert float(change["value"]) == pytest.approx(224**0.5, rel=1e-5)
    (both,) = tmp_path.glob(
        "*/report.json"
    )  # the two ends share one run of the reference, and nothing lies between them
    report = json.loads(both.read_text())
    assert [one["version"] for one in report["candidates"]] == ["2.3.1", "2.3.0"]
    assert "detection limits" in [gap["what"] for gap in report["not_tested"]]
    again = CliRunner().invoke(app, [*args, "--quiet"])
    assert again.output.startswith("transformer_lens 2.3.1 of 2024-08-13 repaired attention.scale 14.9666")


def test_the_index_knows_releases_and_their_days():
    found = releases_between("transformer-lens", "2.3.0", "2.4.0", "3.11")

    assert [one.version for one in found] == ["2.3.0", "2.3.1", "2.4.0"]
    assert [one.date for one in found] == ["2024-07-31", "2024-08-13", "2024-08-14"]
