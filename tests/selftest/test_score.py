"""The score sheet itself: right answers count, wrong names, layers and values do not, and clean ports may not be accused."""

from __future__ import annotations

import dataclasses

import pytest

from parity_audit.core.errors import UsageError
from parity_audit.core.report import Candidate, Finding, Patch, Patched, Proof, Verdict
from parity_audit.core.types import NotTested
from parity_audit.selftest.corpus import Fault, load_corpus, resolved
from parity_audit.selftest.score import not_judged, score, share
from parity_audit.selftest.table import by_origin, calibration, false_alarms, hit_rows, misjudged, missed, part_counts

FAULT = Fault(
    id="f", model="m", plant=[{"op": "output", "module": "x", "times": 2.0}], knob="attention.scale", value=10.0,
    layers=[1], site="blocks.1.attn_scores",
)  # fmt: skip


def finding(knob: str = "attention.scale", value: object = 10.02, layers: tuple[int, ...] | None = (1,)) -> Finding:
    return Finding(
        knob=knob, kind="constant", layers=layers, site="x", reference_value=8.0, candidate_value=value, confidence=0.9
    )


def candidate(*findings: Finding, verdict: Verdict = Verdict.MISMATCH, site: str = "blocks.1.attn_scores") -> Candidate:
    return Candidate(
        backend="python", package="", version="", settings={}, dtype="float32", device="cpu", verdict=verdict, why="",
        findings=findings, first_divergence={"site": site} if verdict is Verdict.MISMATCH else None,
    )  # fmt: skip


def test_a_right_answer_is_right_in_every_column():
    got = score(FAULT, candidate(finding()))

    assert (got.detected, got.placed, got.named, got.layers, got.valued) == (True,) * 5
    assert (got.repaired, got.recognised, got.false_alarms) == (None, False, ())


@pytest.mark.parametrize(
    ("answer", "column"),
    [
        (candidate(verdict=Verdict.PARITY), "detected"),
        (candidate(finding(), site="blocks.2.attn_scores"), "placed"),
        (candidate(finding("rope.theta")), "named"),
        (candidate(finding(layers=(1, 2))), "layers"),
        (candidate(finding(value=10.2)), "valued"),
        (candidate(), "named"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_wrong_in_its_column(answer, column):
    got = score(FAULT, answer)

    assert getattr(got, column) is False
    assert missed([got]) == [got]


def test_a_finding_that_is_not_there_is_a_false_alarm():
    assert len(score(FAULT, candidate(finding(), finding("norm.eps"))).false_alarms) == 1


def test_an_error_without_a_cause_is_a_false_alarm_beside_all_parts_that_were_planted():
    left = dataclasses.replace(finding("mlp_out"), kind="unexplained", site="blocks.1.mlp_out")
    clean = Fault(id="m clean", model="m", plant=[], knob="", harmless=True)

    assert len(score(FAULT, candidate(finding(), left)).false_alarms) == 1
    assert score(FAULT, candidate(left)).false_alarms == ()
    assert score(FAULT.model_copy(update={"also": ["mlp_out"]}), candidate(finding(), left)).false_alarms == ()
    assert len(score(clean, candidate(left)).false_alarms) == 1


def test_stacked_faults_need_every_name():
    stacked = FAULT.model_copy(update={"knob": ["attention.scale", "norm.eps"], "value": None, "layers": None})

    assert score(stacked, candidate(finding())).named is False
    assert score(stacked, candidate(finding(), finding("norm.eps"))).named is True


def test_a_patch_counts_only_when_it_reached_parity():
    patch = Patch(knob="attention.scale", backend="b", value=8.0, edits=(), code="", fixes=())
    patched = Patched(verdict=Verdict.PARITY, logits=None, sites=(), target=0.0, target_reached=True)
    offered = dataclasses.replace(candidate(finding()), patches=(patch,))
    setting = FAULT.model_copy(update={"plant": [{"op": "set", "module": "x", "attr": "scaling", "value": 1.0}]})

    assert score(setting, offered).repaired is False
    assert score(setting, candidate(finding())).repaired is False
    assert score(FAULT, dataclasses.replace(offered, patched=patched)).repaired is True


def test_a_fault_in_code_is_recognised_by_a_proof_or_by_saying_that_nothing_sets_it():
    proof = Proof(
        proven=True, statement="", imposed=(), verdict=Verdict.PARITY, why="", before=None, after=None
    )  # fmt: skip
    said = NotTested(what="a patch for attention.scale", why="no setting")
    other = NotTested(what="a patch for norm.eps", why="no setting")

    proved, told = (score(FAULT, dataclasses.replace(candidate(finding()), **facts)) for facts in
                    ({"proof": proof}, {"not_tested": (said,)}))  # fmt: skip
    assert (proved.recognised, proved.proved) == (True, True)
    assert (told.recognised, told.proved) == (True, False)
    assert score(FAULT, dataclasses.replace(candidate(finding()), not_tested=(other,))).recognised is False


def test_a_clean_port_that_is_accused_counts_against_the_auditor():
    clean = Fault(id="m clean", model="m", plant=[], knob="", harmless=True)
    good, bad = score(clean, candidate(verdict=Verdict.EXACT)), score(clean, candidate(finding()))

    assert false_alarms([good]) == (0, 1)
    assert false_alarms([good, bad]) == (1, 2)


def test_the_table_counts_only_what_was_asked():
    rows = {label: (right, asked) for label, right, asked in hit_rows([score(FAULT, candidate(finding()))])}

    assert rows["detected"] == (1, 1)
    assert rows["repaired by its patch"] == (0, 0)
    assert share([True, None, False]) == (1, 2)
    assert [row for row in calibration([score(FAULT, candidate(finding()))]) if row[2]] == [("0.80-0.95", 1, 1)]


def test_templates_fit_every_architecture_and_sites_become_modules():
    corpus = load_corpus()
    fault = next(fault for fault in corpus.by_model["gemma-2-2b-it"] if fault.id == "gemma2-scale-224")
    template = next(fault for faults in corpus.by_model.values() for fault in faults if fault.id.endswith("-norm-eps"))

    assert resolved(fault)[0]["module"] == "model.layers.{l}.self_attn"
    assert not resolved(template)[0]["module"].startswith("@")


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(UsageError, match="no fault `llama-theta-1000`") as caught:
        load_corpus().only(["llama-theta-1000"])
    assert "llama-theta-10000" in str(caught.value.hint)
    with pytest.raises(UsageError, match="no fault is planted") as caught:
        load_corpus(["qwen3-0.5b"])
    assert "qwen3-0.6b" in str(caught.value.expected)
    assert set(load_corpus(["Qwen3-0.6B"]).by_model) == {"Qwen/Qwen3-0.6B"}


def test_the_parts_of_a_stacked_fault_are_named_listed_or_missed():
    stacked = Fault(
        id="s", model="m", plant=[{"op": "output"}], knob=["attention.alibi", "attention.alibi", "logits.dtype", "cache.keys"],
        sites=["attn_scores", "z", "logits", "z"],
    )  # fmt: skip
    open_end = dataclasses.replace(finding("logits"), kind="unexplained", site="logits")

    one = score(stacked, candidate(finding("attention.alibi"), open_end))
    both = score(stacked, candidate(finding("attention.alibi"), finding("attention.alibi", value=None), finding("x")))

    assert one.parts == ("named", "missed", "listed as unexplained", "missed")
    assert both.parts == ("named", "named", "missed", "missed")
    assert part_counts([one, both]) == {
        "parts": 8, "named": 3, "listed as unexplained": 1, "missed": 4, "findings too many": 1,
    }  # fmt: skip


def test_a_fault_whose_audit_failed_counts_as_missed():
    stacked = Fault(id="x", plant=[], knob=["a.b", "c.d"], sites=["a", "b"])
    lost = not_judged(stacked, "out of memory")

    assert (lost.detected, lost.named, lost.parts, lost.error) == (False, False, ("missed", "missed"), "out of memory")


def test_only_the_exact_name_counts_and_what_else_is_true_is_none_too_many():
    fault = Fault(
        id="x", plant=[], knob=["attention.softmax_dtype", "cache.dtype"], also=["rot_k.rounded"], sites=["a", "b"]
    )
    softmax, cache = finding("attention.softmax_dtype"), finding("cache.dtype")

    near = score(fault, candidate(softmax, finding("cache.dtypes")))
    also = score(fault, candidate(softmax, finding("rot_k.rounded")))
    both = score(fault, candidate(cache, softmax, finding("rot_k.rounded")))

    assert (near.named, near.parts, len(near.false_alarms)) == (False, ("named", "missed"), 1)
    assert (also.named, also.parts, also.false_alarms) == (False, ("named", "missed"), ())
    assert (both.named, both.parts, both.false_alarms) == (True, ("named", "named"), ())
    assert [misjudged([one]) for one in (near, also, both)] == [True, True, False]


def test_templates_are_counted_apart():
    one = score(FAULT, candidate(finding()))
    many = [dataclasses.replace(one, template=True, named=named) for named in (True, False)]
    rows = {name: {label: (right, asked) for label, right, asked in rows}["knob named"] for name, rows in
            by_origin([one, *many]).items()}  # fmt: skip

    assert rows == {"written one by one": (1, 1), "templates": (1, 2)}
    corpus = load_corpus(["gpt2"]).by_model["gpt2"]
    assert {fault.template for fault in corpus if fault.id.endswith("-norm-eps")} == {True}
    assert {fault.template for fault in corpus if fault.id == "history-einsum"} == {False}


def test_nothing_is_asked_of_repairs_that_were_not_tried():
    got = score(FAULT, candidate(finding()), repair=False)

    assert (got.repaired, got.recognised, got.proved) == (None, None, None)


def test_stacked_faults_run_with_one_tag():
    stacked = load_corpus().tagged("stacked")

    assert stacked.size >= 25
    assert len(stacked.by_model) >= 5
    assert {fault.host.partition("==")[0] for faults in stacked.by_model.values() for fault in faults} == {
        "", "transformer_lens",
    }  # fmt: skip
    with pytest.raises(UsageError, match="no fault has the tag `stakced`"):
        load_corpus().tagged("stakced")
