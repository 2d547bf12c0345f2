"""Ports of one's own, audited whole: a plain torch Llama with a site map, right and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

import parity_audit
from parity_audit.core.errors import SpecError, UsageError
from parity_audit.core.report import Verdict
from parity_audit.diagnose.extent import DECODED

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
LLAMA = "meta-llama/Llama-3.2-1B"
PORTS = Path(__file__).parents[1] / "ports"
PORT, SITES = PORTS / "plain_llama.py", PORTS / "plain_llama_sites.yaml"
PROBES = ("short", "left_padded")


def audit(tmp_path: Path, *candidates: str):
    return parity_audit.audit(
        LLAMA, candidates=candidates, miniature="mini", out=tmp_path / "out", probes=PROBES, limits=False
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    right = f"python:{PORT}:load,sites={SITES}"
    return audit(
        tmp_path_factory.mktemp("ports"), right, f"{right},scale=9.5", f"python:{PORT}:load",
        f"python:{PORT}:forgot_to_return,sites={SITES}",
    )  # fmt: skip


def test_a_right_port_is_at_parity(report):
    right = report.candidates[0]

    assert right.verdict in (Verdict.EXACT, Verdict.PARITY)
    assert right.findings == ()
    assert right.not_visible == ()
    assert {delta.site for delta in right.sites} >= {"blocks.3.attn_scores", "blocks.0.rot_k", "logits"}


def test_a_wrong_constant_is_named_with_its_layer_and_mended(report):
    right, wrong = report.candidates[:2]

    assert wrong.verdict is Verdict.MISMATCH
    assert [(finding.knob, finding.layers) for finding in wrong.findings] == [("attention.scale", (1,))]
    assert wrong.findings[0].candidate_value == pytest.approx(9.5, rel=1e-4)
    assert wrong.findings[0].reference_value == pytest.approx(8.0, rel=1e-4)
    assert wrong.patched.verdict is right.verdict


def test_edited_hooks_are_told_from_hooks_that_nothing_reads(tmp_path):
    right = f"python:{PORT}:load,sites={SITES}"
    prescaled = f"python:{PORTS}/routes.py:load,sites={PORTS}/routes_sites.yaml,route=prescaled_q"
    good, dead, bridge, guessed = parity_audit.audit(
        LLAMA, candidates=(right, f"{right},dead_hook=true", "transformer_lens", prescaled), miniature="mini", hooks=True,
        out=tmp_path / "out", probes=PROBES, limits=False,
    ).candidates  # fmt: skip

    assert good.verdict in (Verdict.EXACT, Verdict.PARITY)
    assert {edit.site for edit in good.hook_edits} >= {"blocks.1.resid_mid", "blocks.1.pattern", "blocks.1.q", "embed"}
    assert all(edit.same for edit in good.hook_edits)
    assert guessed.verdict in (Verdict.EXACT, Verdict.PARITY)
    assert "guessed" in next(gap.why for gap in guessed.not_tested if gap.what == "editing blocks.1.rot_q")
    assert wrong_hooks(dead) == {
        "blocks.1.mlp_out": "the edit has no effect: the hook shows a tensor that nothing reads"
    }
    # The bridge's hook stands before the norm: the residual stream goes past it.
    assert wrong_hooks(bridge) == {
        "blocks.1.hook_resid_mid": "the edit reaches the norm after it, and not the residual stream"
    }
    assert {edit.site for edit in bridge.hook_edits if edit.same} >= {
        "blocks.1.hook_attn_out", "blocks.1.ln1.hook_scale", "blocks.1.ln1.hook_normalized", "blocks.1.attn.hook_result",
    }  # fmt: skip
    assert bridge.findings == ()
    assert (dead.verdict, bridge.verdict) == (Verdict.MISMATCH, Verdict.MISMATCH)
    assert "outputs agree, but editing blocks.1.mlp_out" in dead.why


def wrong_hooks(candidate):
    return {edit.site: edit.says for edit in candidate.hook_edits if not edit.same}


def test_an_error_in_cached_decoding_is_no_parity_and_a_port_without_cache_is_not_accused(tmp_path):
    ports = [f"python:{PORTS}/caches.py:{name}" for name in ("one_index_twice", "keeps_none")]
    report = parity_audit.audit(
        LLAMA,
        candidates=ports,
        miniature="mini",
        repair=False,
        out=tmp_path / "out",
        probes=("short", "decode"),
        limits=False,
    )
    fails, keeps_none = report.candidates

    assert fails.verdict is Verdict.INCONCLUSIVE
    assert fails.why.startswith("cached decoding (probe decode): RuntimeError: The size of tensor")
    assert "; elsewhere bit-identical at " in fails.why
    assert any("name the probes that do with --probe" in said for said in fails.warnings)
    assert keeps_none.verdict is Verdict.EXACT
    assert [gap.why for gap in keeps_none.not_tested if "cached decoding" in gap.what] == [
        "NotImplementedError: asked for its cache, the model returned none"
    ]
    assert report.exit_code == 3


def test_what_one_kind_of_decoding_alone_gets_wrong_is_named_with_where_it_holds(tmp_path):
    names = ("positions_count_padding", "steps_of_several_see_ahead", "rows_exchanged")
    counts, ahead, exchanged = parity_audit.audit(
        LLAMA, candidates=[f"python:{PORTS}/caches.py:{name}" for name in names], miniature="mini", repair=False,
        out=tmp_path / "out", probes=("short", "left_padded", "decode", "decode_batch", "continued"), limits=False,
    ).candidates  # fmt: skip

    assert said(counts) == [
        ("rope.offset", "counted from the padding", f"{DECODED}, in rows that are padded on the left")
    ]
    assert said(ahead) == [("attention.mask", "not causal", f"{DECODED} several at a time")]
    assert said(exchanged) == [
        ("cache.keys", "the prompt of the next row", f"{DECODED}, in batches of more than one row")
    ]


def said(candidate):
    assert candidate.verdict is Verdict.MISMATCH
    return [(item.knob, item.candidate_value, item.evidence["extent"]) for item in candidate.findings]


@pytest.mark.parametrize(
    ("number", "says"),
    [(2, "needs a site map"), (3, "the port returned None")],
)
def test_a_port_that_cannot_be_run_says_what_to_do(report, number, says):
    broken = report.candidates[number]

    assert broken.verdict is Verdict.ERROR
    assert says in broken.why
    assert report.exit_code == 3


def test_mistakes_that_need_no_worker_are_refused_first(tmp_path):
    with pytest.raises(UsageError, match="no file"):
        audit(tmp_path, f"python:{PORTS}/plain_lama.py:load")
    with pytest.raises(UsageError, match="did you mean `load`"):
        audit(tmp_path, f"python:{PORT}:lod,sites={SITES}")
    with pytest.raises(UsageError, match="did you mean `scale`"):
        audit(tmp_path, f"python:{PORT}:load,sites={SITES},scael=3")
    broken = tmp_path / "sites.yaml"
    broken.write_text("sites:\n  embed: {modul: embed}\n")
    with pytest.raises(SpecError) as caught:
        audit(tmp_path, f"python:{PORT}:load,sites={broken}")
    assert "sites.yaml:2" in caught.value.where
