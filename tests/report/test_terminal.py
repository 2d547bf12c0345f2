"""The terminal report: verdict first, nothing cut at 80 columns, no colour needed, foreign text harmless."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

import pytest
from sample import CLEAN, EVIL_REPORT, LIMIT, NOTHING, ONE_DEAD, PATCH, REPORT, WRONG

from parity_audit.core.report import Verdict
from parity_audit.report.code import fold_code
from parity_audit.report.terminal import render

ALL = {"mismatch": REPORT, "one-dead": ONE_DEAD, "nothing": NOTHING, "evil": EVIL_REPORT}


@pytest.mark.parametrize("report", ALL.values(), ids=ALL)
@pytest.mark.parametrize("width", [60, 80, 132])
def test_no_line_is_wider_than_the_terminal(report, width):
    assert max(len(line) for line in render(report, width=width).splitlines()) <= width


@pytest.mark.parametrize("width", [60, 80])
def test_identifiers_are_never_cut(width):
    joined = re.sub(r"\s", "", render(REPORT, width=width))

    for name in ("blocks.0.attn_scores", "attention.softcap", "google/gemma-2-2b-it", "blocks.*.rot_q"):
        assert name in joined
    assert "…" not in joined


def test_the_releases_that_each_side_ran_on_are_said():
    joined = " ".join(render(REPORT).split())

    assert "releases hf: transformers 4.43.2, torch 2.4.1, python 3.10.4" in joined


def test_the_first_line_is_the_verdict_and_the_second_the_reason():
    first, *rest = render(REPORT).splitlines()

    assert first.startswith("Mismatch: transformer_lens 2.3.0")
    assert any("7.2e+04x the noise floor" in line for line in rest[:3])


@pytest.mark.parametrize("report", [NOTHING, ONE_DEAD], ids=["nothing", "one-dead"])
def test_exit_3_says_first_that_nothing_was_judged(report):
    assert render(report).startswith("Nothing was judged")


def test_a_judged_run_does_not_say_so():
    assert "Nothing was judged" not in render(REPORT)


def test_what_died_is_named_and_the_other_result_is_whole():
    text = render(ONE_DEAD)

    assert text.startswith("Nothing was judged for vllm 0.32.0. Mismatch: transformer_lens 2.3.0")
    assert "vllm died (signal 9)" in text
    assert "14.9666" in text


PROVED = [
    "0.323 -> 6.32e-06",
    "3e-06 (1.9e-05 %)",
    "4e-05 (0.00025 %) in layer 3",
    "imposed attention.softcap  50, everywhere",
]


@pytest.mark.parametrize(
    "says", ["14.9666", "4.65e-06", "0.323", "target  reached", "sdpa", "not run on a GPU yet", *PROVED]
)
def test_what_a_reader_looks_for_is_there(says):
    assert says in render(REPORT, where="out/report.json")


def test_where_the_report_lies_is_the_last_line():
    assert render(REPORT, where="out/report.json").splitlines()[-1] == "report: out/report.json"


def test_the_code_of_a_patch_can_be_copied():
    block = "\n".join(line.removeprefix("    ") for line in render(REPORT).splitlines())
    assert PATCH.code in block


def test_foreign_text_is_shown_and_not_obeyed():
    text = render(EVIL_REPORT, colour=True)

    assert "[bold]hub/x[/evil]" in re.sub(r"\s|\x1b\[[0-9;]*m", "", text)
    assert "\\x1b" in text
    assert "\x1b[31mred" not in text


def test_without_colour_there_is_no_escape_sequence():
    assert "\x1b" not in render(REPORT)
    assert "\x1b[" in render(REPORT, colour=True)


def test_colour_adds_nothing_but_colour():
    coloured = re.sub(r"\x1b\[[0-9;]*m", "", render(REPORT, colour=True))
    assert [line.rstrip() for line in coloured.splitlines()] == render(REPORT).splitlines()


def test_ascii_only_is_ascii_and_loses_no_number():
    text = render(EVIL_REPORT, ascii_only=True)

    assert text.isascii()
    assert not render(REPORT).isascii()
    assert re.findall(r"\d\.\d+e[-+]\d+", text) == re.findall(r"\d\.\d+e[-+]\d+", render(EVIL_REPORT))


def test_a_parity_report_has_no_finding_and_no_patch():
    text = render(replace(REPORT, candidates=(CLEAN,), exit_code=0))

    assert text.startswith("Parity: vllm 0.32.0")
    assert "Findings" not in text
    assert "Patch" not in text


def test_exact_is_only_said_when_all_are_exact():
    exact = replace(CLEAN, verdict=Verdict.EXACT)

    assert "bit-identical" in render(replace(REPORT, candidates=(exact, exact)))
    assert "bit-identical" not in render(replace(REPORT, candidates=(exact, CLEAN))).splitlines()[0]


def test_a_port_whose_logits_are_right_is_not_said_to_compute_something_else():
    """The function is what is returned; hooks that show something else are named as that."""
    lying = replace(WRONG, logits=CLEAN.logits, findings=(), patches=(), patched=None)
    said = " ".join(render(replace(REPORT, candidates=(lying,))).split())

    assert CLEAN.logits.noise_ratio <= 4.0 < WRONG.logits.noise_ratio
    assert "does not compute the reference's function" not in said
    assert "returns the reference's logits, but what its hooks show" in said
    both = " ".join(render(replace(REPORT, candidates=(lying, WRONG))).split())
    assert "does not compute the reference's function" in both


def test_quiet_blocks_of_a_deep_model_are_one_row_and_loud_ones_are_not():
    sites = [
        replace(WRONG.sites[1], site=f"blocks.{layer}.resid_pre", layer=layer, noise_ratio=9.0 if layer == 7 else 1.0)
        for layer in range(26)
    ]
    text = render(replace(REPORT, candidates=(replace(CLEAN, sites=tuple(sites)),)))

    assert re.search(r"blocks\.0-6 .*\n *blocks\.7 .*9x.*\n *blocks\.8-25 ", text)


LONG = "inv_freq = torch.tensor([" + ", ".join(f"{0.5**n:.17g}" for n in range(64)) + "], dtype=torch.float64)"


@pytest.mark.parametrize("code", [LONG, f"for b in m:\n    {LONG}", 'f("a, b, c, ' + "d, " * 30 + '", g=[1, 2])'])
def test_folded_code_is_the_same_program(code):
    folded = fold_code(code, 76)

    assert ast.dump(ast.parse(folded)) == ast.dump(ast.parse(code))
    assert folded != code


def test_a_coarse_dtype_says_in_words_what_it_cannot_see():
    coarse = replace(
        WRONG, dtype="bfloat16",
        detection=(replace(LIMIT, limit=0.31, relative=0.019), replace(LIMIT, knob="norm.eps", relative=120.0)),
    )  # fmt: skip
    said = " ".join(render(replace(REPORT, candidates=(coarse,))).split())

    assert "bfloat16 cannot prove a port right" in said
    assert "attention.scale by 1.9 %, norm.eps by 1.2e+02 times its value" in said
    assert "cannot prove" not in render(REPORT)


def test_candidates_of_one_release_are_told_apart_by_their_settings():
    long = "x" * 60
    alike = [replace(CLEAN, settings={"attn_implementation": kind, "path": long}) for kind in ("eager", "sdpa", "sdpa")]
    text = " ".join(render(replace(REPORT, candidates=tuple(alike)), width=400).split())

    for name in (f"(attn_implementation=eager, path={long})", f"=sdpa, path={long}) #1", f"=sdpa, path={long}) #2"):
        assert text.count(f"vllm 0.32.0 {name}".replace("vllm 0.32.0 =", "vllm 0.32.0 (attn_implementation=")) >= 2
