"""What takes the place of a reference that departs from the spec, and who is patched then."""

import dataclasses
from types import SimpleNamespace

import pytest

from parity_audit.audit.outcome import exit_code_of
from parity_audit.audit.right_reference import AGREES, confirmed, left_to_prove, remedy, wrong
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.report import Candidate, Finding, Patched, RightReference, Verdict
from parity_audit.repair.choose import propose, target_value
from parity_audit.specs.resolve import resolve_model

GEMMA = resolve_model("gemma-2-2b-it")
CAP = Finding(
    knob="attention.softcap", kind="constant", layers=None, site="blocks.0.attn_scores", reference_value=None,
    candidate_value=50.001, spec_value=50.0, departs_from_spec="reference",
)  # fmt: skip
SCALE = dataclasses.replace(
    CAP, knob="attention.scale", reference_value=16.0, candidate_value=14.97, spec_value=16.0, departs_from_spec="candidate"
)  # fmt: skip
BOTH = dataclasses.replace(SCALE, reference_value=15.0, departs_from_spec="both")
UNEXPLAINED = dataclasses.replace(CAP, kind="unexplained")


def plan(backend, key="hf"):
    config = {**GEMMA.config, "num_hidden_layers": 4}
    return SimpleNamespace(ref=parse_backend(backend), spec=GEMMA.spec, config=config, backend_key=key)


def found(backend, *causes, judged_by_definition=False, key="hf"):
    chosen = remedy(plan(backend, key), "5.19.0", causes, judged_by_definition=judged_by_definition)
    return None if chosen is None else (str(chosen.ref), len(chosen.edits) > 0)


@pytest.mark.parametrize(
    ("backend", "cause", "expected"),
    [
        ("hf,attn_implementation=sdpa", CAP, ("hf,attn_implementation=eager", False)),
        ("hf==4.43.2,attn_implementation=sdpa", CAP, ("hf==4.43.2,attn_implementation=eager", False)),
        # A scale has no load setting: what was given on the command line is taken away, else the live value is edited.
        ("hf,query_pre_attn_scalar=225", BOTH, ("hf", False)),
        ("hf", BOTH, ("hf", True)),
    ],
)
def test_the_command_that_puts_a_reference_right(backend, cause, expected):
    assert found(backend, cause) == expected


def test_a_reference_that_the_definition_judged_is_replaced_by_it():
    assert found("transformer_lens==2.3.0", SCALE, judged_by_definition=True, key="hooked_transformer") == ("hf", False)


def test_a_constant_without_any_setting_has_no_remedy():
    assert found("hf", dataclasses.replace(CAP, knob="n_kv_heads")) is None


def test_the_edit_of_a_reference_writes_the_value_of_the_spec():
    chosen = remedy(plan("hf"), "5.19.0", [BOTH], judged_by_definition=False)

    assert [edit.value for edit in chosen.edits] == [1 / 16]


def test_which_findings_are_the_reference_s():
    assert wrong([CAP, SCALE, BOTH, UNEXPLAINED]) == [CAP, BOTH]


def test_nobody_is_patched_to_follow_a_wrong_reference():
    transformer_lens = plan("transformer_lens==2.3.0", "hooked_transformer")

    def knobs(**how):
        proposals, gaps = propose([SCALE, CAP], transformer_lens, "2.3.0", known=[SCALE, CAP], **how)
        assert gaps == []
        return {proposal.knob: proposal.value for proposal in proposals}

    assert knobs() == {"attention.scale": 16.0}
    assert knobs(match_reference=True) == {"attention.scale": 16.0, "attention.softcap": None}


def test_where_both_are_wrong_the_candidate_gets_the_spec_s_value_unless_it_shall_match():
    assert target_value(BOTH) == 16.0
    assert target_value(BOTH, match_reference=True) == 15.0


def right(verdict, verified=False):
    return RightReference(
        knobs=("attention.softcap",), backend="hf,attn_implementation=eager", code="", verified=verified, why="", verdict=verdict
    )  # fmt: skip


def candidate(replacement, patched=None):
    after = (
        None if patched is None else Patched(verdict=patched, logits=None, sites=(), target=1e-5, target_reached=True)
    )
    return Candidate(
        backend="hf", package="", version="", settings={}, dtype="float32", device="cpu", verdict=Verdict.MISMATCH, why="",
        findings=(CAP, SCALE), right_reference=replacement, patched=after,
    )  # fmt: skip


def test_a_candidate_that_agrees_with_the_replacement_confirms_it():
    as_shipped, mended, neither = (
        confirmed(candidate(right(verdict), patched))
        for verdict, patched in ((Verdict.EXACT, None), (Verdict.MISMATCH, Verdict.PARITY), (Verdict.MISMATCH, Verdict.MISMATCH))
    )  # fmt: skip

    assert [one.right_reference.verified for one in (as_shipped, mended, neither)] == [True, True, False]
    assert mended.right_reference.why == AGREES
    assert mended.patched.against == "hf,attn_implementation=eager"


def test_only_a_replacement_that_was_run_takes_the_reference_s_findings_off():
    assert left_to_prove(candidate(right(Verdict.MISMATCH))) == (SCALE,)
    assert left_to_prove(candidate(right(None))) == (CAP, SCALE)
    assert left_to_prove(candidate(None)) == (CAP, SCALE)


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.PARITY, 0), (Verdict.MISMATCH, 1), (None, 1)])
def test_a_right_candidate_beside_a_wrong_reference_still_differs_from_it(verdict, code):
    results = [candidate(right(verdict))]

    assert exit_code_of(results, accept_patched=False) == 1
    assert exit_code_of(results, accept_patched=True) == code
