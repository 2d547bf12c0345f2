"""The page of an audit: the answer first, every number of the heat map, nothing executed, nothing requested, nothing lost."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from browser import CHROMIUM, opened
from sample import EVIL_REPORT, NOTHING, ONE_DEAD, REPORT, WRONG, delta

from parity_audit.core.report import Report, Verdict
from parity_audit.report.audit_page import render
from parity_audit.report.heat import brief, heat_map
from parity_audit.report.page import SCRIPT, policy, style
from parity_audit.report.pictures.layers import fitted_by_layer, noise_by_layer, score_curve
from parity_audit.report.words import headline

BREAKS_OUT = "</title></style></script><script>alert(1)</script><img src=x onerror=alert(2)>"
EVIL_PAGE = replace(EVIL_REPORT, model=BREAKS_OUT, candidates=(replace(WRONG, backend=BREAKS_OUT, why=BREAKS_OUT),))
ALL = {"two": REPORT, "dead": ONE_DEAD, "nothing": NOTHING, "evil": EVIL_REPORT, "breaks-out": EVIL_PAGE}
VOID = {"meta", "br", "rect", "line", "path", "circle", "polyline"}


class Page(HTMLParser):
    """Elements in order with their attributes, and the text of each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.mark.parametrize("report", ALL.values(), ids=ALL)
def test_every_element_is_closed_and_nothing_is_loaded(report: Report):
    page = Page(render(report))
    attributes = {name for _, own in page.elements for name in own}

    assert page.open == []
    assert {tag for tag, _ in page.elements}.isdisjoint({"img", "link", "iframe", "object", "a", "base", "form"})
    assert not any(name.startswith("on") or name in ("src", "href", "srcset", "action") for name in attributes)


@pytest.mark.parametrize("report", ALL.values(), ids=ALL)
def test_the_only_script_is_the_one_that_the_policy_names(report: Report):
    page = Page(render(report))

    assert [text.strip() for text in page.texts["script"]] == [SCRIPT.strip()]
    assert page.named("meta")[1]["content"] == policy(SCRIPT)
    assert "unsafe-inline' 'sha" not in policy(SCRIPT)
    assert policy().endswith("style-src 'unsafe-inline'")


def test_a_name_that_closes_elements_stays_text():
    page = Page(render(EVIL_PAGE))

    assert page.texts["h1"] == [headline(EVIL_PAGE)]
    assert BREAKS_OUT in page.texts["title"][0]


def test_the_answer_is_the_first_heading_and_every_candidate_has_its_row():
    page = Page(render(REPORT))
    rows = re.findall(
        r'<tr><th scope="row">([^<]*)</th><td data-label="verdict"><span class="badge (\w+)">', render(REPORT)
    )

    assert page.texts["h1"] == [headline(REPORT)]
    assert rows == [("transformer_lens 2.3.0", "bad"), ("vllm 0.32.0", "good")]


def test_headers_of_tables_say_what_they_head_and_pictures_have_names():
    page = Page(render(REPORT))

    assert {own.get("scope") for own in page.named("th")} == {"col", "row"}
    assert all(own.get("aria-label") or own.get("aria-hidden") for own in page.named("svg"))
    assert all(own.get("tabindex") == "0" for own in page.named("pre"))


def test_a_cell_of_the_heat_map_is_its_ratio_and_its_class_the_share_of_the_limit():
    sites = (
        delta("blocks.0.resid_post", 2.9),
        delta("blocks.1.resid_post", 3.9),
        delta("blocks.1.z", 15.9),
        delta("logits", 72_000.0),
    )
    text = heat_map("t", "a", sites, lambda own: own.noise_ratio, first="logits")
    cells = re.findall(r'<td class="([^"]*)"( colspan="2")? title="[^"]*">([^<]*)</td>|<td class="(nn)">-</td>', text)

    assert [kind or missing for kind, _, _, missing in cells] == ["n0", "n1", "nn", "n1", "n4 first"]
    assert [(wide, number) for _, wide, number, _ in cells if number] == [
        ("", "2.9"), ("", "3.9"), ("", "16"), (' colspan="2"', "7e4"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.94, "0.9"), (9.96, "10"), (136.7, "137"), (999.6, "1e3"), (1e30, "1e30")]
)
def test_a_ratio_takes_at_most_four_signs(value, text):
    assert brief(value) == text


def heights(picture: str) -> list[float]:
    """Pixels of the candidate's points, from the top."""
    points = re.search(r'<polyline points="([^"]*)" class="observed"', picture)[1]
    return [float(pair.split(",")[1]) for pair in points.split()]


def test_the_curve_runs_through_the_ratios_on_a_logarithmic_axis():
    """1, 10 and 1000: equal factors are equal distances, so the first step is a third of the whole."""
    sites = tuple(delta(f"blocks.{layer}.resid_post", ratio) for layer, ratio in enumerate((1.0, 10.0, 1000.0)))
    picture = noise_by_layer(replace(WRONG, sites=sites, patched=None))
    low, middle, high = heights(picture)

    assert (low - middle) / (low - high) == pytest.approx(1 / 3, abs=1e-3)
    assert 'class="limit"' in picture
    assert "multiple of the noise floor" in picture


def test_fitted_constants_lie_where_their_values_are():
    """Layers at 14, 15 and 16 lie evenly; the spec's line at 16 is where the third one is."""
    entries = [{"layer": layer, "value": value} for layer, value in enumerate((14.0, 15.0, 16.0))]
    picture = fitted_by_layer(replace(WRONG.findings[0], evidence={"candidate": entries}))
    first, second, third = heights(picture)
    line = float(re.search(r'y1="([\d.]+)" [^>]*class="limit"', picture)[1])

    assert first - second == pytest.approx(second - third, abs=0.11)
    assert line == third


def test_scatter_within_rounding_is_not_drawn_as_a_trend():
    """Fits a millionth apart lie within a pixel of one another."""
    entries = [{"layer": layer, "value": 50.0 + layer * 5e-5} for layer in range(4)]
    at = heights(fitted_by_layer(replace(WRONG.findings[0], evidence={"candidate": entries}, spec_value=50.0)))

    assert max(at) - min(at) < 1.0


def test_a_finding_without_a_series_and_a_candidate_without_ratios_have_no_picture():
    assert fitted_by_layer(WRONG.findings[1]) == ""
    assert noise_by_layer(replace(WRONG, sites=())) == ""


def test_numbers_are_open_where_something_is_wrong_and_folded_where_not():
    assert re.findall(r"<details( open)?>", render(REPORT)) == [" open", ""]


def test_a_verdict_is_a_word_with_a_sign():
    text = render(replace(REPORT, candidates=tuple(replace(WRONG, verdict=verdict) for verdict in Verdict)))

    assert set(re.findall(r'<span class="badge \w+">(.) (\w+)</span>', text)) >= {
        ("✓", "exact"), ("✓", "parity"), ("✕", "mismatch"), ("?", "inconclusive"), ("!", "error"),
    }  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the page was not opened in a browser")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_opens_in_a_browser_without_an_error_or_a_request(tmp_path, width, dark):
    path = tmp_path / "report.html"
    path.write_text(render(EVIL_PAGE), encoding="utf-8")
    seen = opened(path, tmp_path, width=width, dark=dark)

    assert seen.picture.stat().st_size > 10_000
    assert seen.console == ()
    assert seen.addresses == ()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_an_error_and_a_request_would_be_seen(tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<script>console.error('broken')</script><img src='http://127.0.0.1:9/x.png'>")
    seen = opened(path, tmp_path)

    assert any("broken" in line for line in seen.console)
    assert any("127.0.0.1:9/x.png" in address for address in seen.addresses)


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_text_has_the_contrast_of_wcag_aa(scheme):
    """4.5 : 1, for text of every size on what it stands on."""
    named = dict(re.findall(r"--([\w-]+): (#\w{6})", re.findall(r":root \{(.*?)\}", style(), re.DOTALL)[scheme]))
    pairs = [(ink, "surface") for ink in ("ink", "muted", "good", "bad", "unsure", "accent")]
    pairs += [("muted", "ground"), ("n4-ink", "n4"), *((kind, f"{kind}-soft") for kind in ("good", "bad", "unsure"))]
    pairs += [("ink", cell) for cell in ("n0", "n1", "n2", "n3")]
    ratios = {}
    for ink, ground in pairs:
        dark, bright = sorted((luminance(named[ink]), luminance(named[ground])))
        ratios[ink, ground] = (bright + 0.05) / (dark + 0.05)

    assert {pair: value for pair, value in ratios.items() if value < 4.5} == {}


def test_the_tokens_whose_logits_differ_most_are_named_and_their_text_stays_text():
    page = render(REPORT)

    assert "1 of these 1 tokens have another likeliest successor" in page
    assert "262 &quot;&lt;/script&gt;&lt;b&gt;&quot;" in page
    assert "11 &quot;\\n&quot;" in page
    assert page.count("Tokens whose logits differ most") == sum(bool(one.worst_tokens) for one in REPORT.candidates)


def test_scores_are_drawn_with_the_law_of_each_side():
    def entry(divisor: float) -> dict[str, object]:
        return {"layer": 0, "value": divisor, "points": [[at, at / divisor, at / divisor] for at in (-40.0, 0.0, 40.0)]}

    picture = score_curve(replace(WRONG.findings[0], evidence={"candidate": [entry(15.0)], "reference": [entry(16.0)]}))

    assert (picture.count("<circle"), picture.count("<polyline")) == (3, 2)
    assert score_curve(replace(WRONG.findings[0], evidence={"candidate": [{"layer": 0, "value": 15.0}]})) == ""
