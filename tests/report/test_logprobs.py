"""The log-prob report in every format: nothing lost, nothing executed, nothing requested."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, opened

from parity_audit.core.logprob_report import Leg, LogprobFinding, LogprobReport, TokenTable
from parity_audit.core.report import Verdict
from parity_audit.core.rollouts import Completion, Sampling
from parity_audit.logprobs.paired import paired
from parity_audit.logprobs.reporting import pair_report, preset, token_table, worst_rows
from parity_audit.report.logprob_content import logprob_content, sparkline
from parity_audit.report.logprob_page import render
from parity_audit.report.markdown import written
from parity_audit.report.pictures.axes import axis
from parity_audit.report.pictures.charts import MOST_POINTS, drawn
from parity_audit.report.terminal import printed

EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def made() -> tuple[LogprobReport, TokenTable]:
    return sample()


def sample() -> tuple[LogprobReport, TokenTable]:
    """Six completions of different lengths, a tenth of a nat apart, with names that try to be markup."""
    rng = np.random.default_rng(0)
    rollout = [(-rng.exponential(2.0, length)).tolist() for length in range(8, 32, 4)]
    train = [(np.array(row) - 0.1 * rng.random(len(row))).tolist() for row in rollout]
    pair = paired(rollout, train)
    completions = [Completion(prompt_ids=(1,), token_ids=tuple(range(len(row)))) for row in rollout]
    report = LogprobReport(
        model=EVIL, weights={}, sampling=Sampling(), verdict=Verdict.MISMATCH, why=EVIL, odd_leg="engine-decode",
        legs=(Leg(name=EVIL, backend=EVIL, package=EVIL, version=EVIL, settings={}, dtype="float32", meaning=EVIL),),
        pairs=(pair_report(pair, rollout="engine-decode", train="trainer", meaning=EVIL),),
        findings=(LogprobFinding(name=EVIL, leg=EVIL, message=EVIL, evidence={EVIL: EVIL}, settings={EVIL: EVIL}, hint=EVIL),),
        presets={"verl": preset("verl", pair)}, worst=worst_rows(pair, completions, None), notes=(EVIL,),
    )  # fmt: skip
    return report, token_table(pair, completions)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_no_foreign_text_becomes_markup_and_nothing_is_loaded(made):
    reader = _Tags()
    reader.feed(render(*made))
    attributes = {name for _, found in reader.tags for name in found}

    assert {tag for tag, _ in reader.tags}.isdisjoint({"script", "img", "link", "iframe", "object", "a"})
    assert not any(name.startswith("on") or name in ("src", "href", "style") for name in attributes)
    assert sum(tag == "svg" for tag, _ in reader.tags) == 5


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the page was not opened in a browser")
def test_the_page_opens_in_a_browser_without_an_error_or_a_request(made, tmp_path):
    page = tmp_path / "logprobs.html"
    page.write_text(render(*made))
    seen = opened(page, tmp_path)

    assert seen.picture.stat().st_size > 10_000
    assert (seen.console, seen.addresses) == ((), ())


def test_every_metric_of_the_table_is_in_every_format(made):
    report, _ = made
    blocks = logprob_content(report)
    text, marked, page = printed(blocks, width=400), written(blocks), render(*made)

    for name in ("rmse_dlogp", "k3_rollout_train", "rollout_corr/chi2_token", "Worst tokens"):
        assert name in text
        assert name in page
        assert name.replace("_", "\\_") in marked


def test_many_points_are_thinned_and_the_extreme_ones_kept():
    xs = [0.0] * 20_000
    ys = [0.0] * 20_000
    ys[12_345] = 9.0
    kept = drawn(xs, ys)

    assert 12_345 in kept
    assert len(kept) <= MOST_POINTS + 1


def test_an_axis_of_one_value_still_has_a_width():
    own = axis([3.0, 3.0], 0, 100)
    assert own.at(3.0) == 50.0


def test_sparkline_of_zeros_is_flat():
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([1.0, 2.0])[-1] == "█"


def test_a_page_is_written_for_a_single_token_sequence(tmp_path: Path):
    pair = paired([[-1.0]], [[-1.0]])
    report = LogprobReport(
        model="m", weights={}, sampling=None, verdict=Verdict.INCONCLUSIVE, why="", odd_leg=None, legs=(),
        pairs=(pair_report(pair, rollout="a", train="b", meaning=""),),
    )  # fmt: skip
    assert "</html>" in render(report, token_table(pair, [Completion(prompt_ids=(1,), token_ids=(2,))]))
