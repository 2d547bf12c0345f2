"""Which switch explains which share of a mismatch: closed forms, and roundings planted in a real bfloat16 model."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import parity_audit
from parity_audit.backends import hf_scores
from parity_audit.core.errors import NotJudged, UsageError
from parity_audit.core.rollouts import Completion, ScoreRequest, Variation
from parity_audit.logprobs.attribution import Target, attribute, parse_target
from parity_audit.logprobs.switches import Switch, engine_switches, joined, trainer_switches
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model

SEQUENCES, TOKENS = 64, 50
SEQUENCE = np.repeat(np.arange(SEQUENCES), TOKENS)
A, B, WORSE, IDLE = (Switch(name=name, trainer={name: 1}) for name in ("a", "b", "worse", "idle"))


@pytest.fixture(scope="module")
def parts() -> dict[str, np.ndarray]:
    """Independent errors of known size: 3, 4 and 1 hundredths of a nat."""
    rng = np.random.default_rng(0)
    return {
        name: scale * rng.standard_normal(len(SEQUENCE)) for name, scale in (("a", 0.03), ("b", 0.04), ("worse", 0.01))
    }


def _trainer(parts):
    """The trainer has errors a and b; the switches a and b remove them, `worse` adds one, `idle` does nothing."""

    def score(changes):
        if "broken" in changes:
            raise NotJudged("no such step\nwith a second line")
        kept = [parts[name] for name in ("a", "b") if name not in changes]
        return np.sum([np.zeros(len(SEQUENCE)), *kept, *([parts["worse"]] if "worse" in changes else [])], axis=0)

    return score


def _found(parts, switches=(A, B, WORSE, IDLE), target=0.8, trainer=None):
    return attribute(
        "engine-decode", SEQUENCE, switches, trainer=trainer or _trainer(parts), engine=lambda _: np.zeros(len(SEQUENCE)),
        target=Target(share=target),
    )  # fmt: skip


def test_shares_of_independent_errors_are_their_variances(parts):
    """a and b have 9 and 16 of 25 parts of the squared error; the interval of each holds it."""
    found = _found(parts)
    by_name = {effect.name: effect for effect in found.alone}

    for name, share in (("a", 9 / 25), ("b", 16 / 25), ("worse", -1 / 25)):
        low, high = by_name[name].interval
        assert low < share < high
        assert high - low < 0.12
        assert by_name[name].rmse == pytest.approx(0.05 * np.sqrt(1 - share), rel=0.03)
    assert not by_name["idle"].moves
    assert by_name["idle"].share == 0.0
    assert [effect.name for effect in found.together] == ["b", "a"]
    assert found.share == 1.0
    assert found.rmse_left == 0.0
    assert found.reached


@pytest.mark.parametrize(("target", "names"), [(0.5, ["b"]), (0.7, ["b", "a"])])
def test_the_set_is_no_larger_than_the_target_needs(target, names, parts):
    found = _found(parts, target=target)

    assert [effect.name for effect in found.proposed] == names
    assert found.reached


def test_a_target_that_no_switch_reaches_is_said_to_be_missed(parts):
    found = _found(parts, switches=(A, WORSE, IDLE))

    assert [effect.name for effect in found.proposed] == ["a"]
    assert not found.reached
    assert found.share == pytest.approx(9 / 25, abs=0.04)


def test_two_roundings_that_only_match_together_are_found_as_a_pair(parts):
    """Each switch alone adds an error of its own; both at once reproduce the other side."""

    def trainer(changes):
        return {0: parts["a"], 1: parts["a"] + parts["b"], 2: np.zeros(len(SEQUENCE))}[len(changes)]

    found = _found(parts, switches=(A, B), trainer=trainer)

    assert {effect.name for effect in found.proposed} == {"a", "b"}
    assert found.share == 1.0
    assert all(effect.share < 0 for effect in found.alone)


def test_chance_is_no_gain(parts):
    """A switch that only replaces one rounding by another of the same size is not proposed."""
    rng = np.random.default_rng(1)
    other = 0.05 * rng.standard_normal(len(SEQUENCE))
    found = _found(parts, switches=(A,), trainer=lambda changes: other if changes else parts["a"] + parts["b"])

    assert found.proposed == ()
    assert not found.reached


def test_a_switch_that_cannot_be_flipped_is_a_gap_and_no_guess(parts):
    found = _found(parts, switches=(A, Switch(name="broken", trainer={"broken": 1})))

    assert [(gap.what, gap.why) for gap in found.not_tested] == [("broken (trainer)", "no such step")]


def test_equal_legs_need_no_switch(parts):
    found = _found(parts, trainer=lambda _: np.zeros(len(SEQUENCE)))

    assert found.reached
    assert found.proposed == ()
    assert found.rmse == 0.0


def test_the_switches_of_a_bfloat16_pair():
    settings = {
        "head_dtype": "bfloat16",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "cache_dtype": "auto",
        "max_num_seqs": 16,
    }
    trainer = trainer_switches("bfloat16", "eager", Variation(rope_dtype="float32"), experts=False)
    names = [(switch.leg, switch.name) for switch in joined(trainer, engine_switches(settings))]

    assert names == [
        ("trainer", "head in float32"), ("trainer", "rotary tables in bfloat16"),
        ("trainer", "keys and values in float8_e4m3fn"), ("trainer", "sdpa attention"), ("trainer", "one sequence at a time"),
        ("engine", "head in float32"), ("engine", "compiled engine"), ("engine", "prefix cache"),
        ("engine", "one sequence at a time"), ("both", "head in float32"), ("both", "one sequence at a time"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "target"),
    [
        (None, Target()),
        ("80%", Target(share=0.8)),
        (0.8, Target(share=0.8)),
        ("rmse=1e-3", Target(share=None, rmse=1e-3)),
    ],
)
def test_targets_as_users_write_them(given, target):
    assert parse_target(given) == target


@pytest.mark.parametrize("given", ["", "x", "0", "1.2", "-0.5", "nan", "rmse=0", "rmse=inf", "rmse=5%", "80"])
def test_what_is_no_target_is_refused(given):
    with pytest.raises(UsageError, match="no target"):
        parse_target(given)


def test_an_rmse_as_target():
    assert Target(share=None, rmse=0.01).reached(1.0, 0.01**2)
    assert not Target(share=None, rmse=0.01).reached(1.0, 0.011**2)


# A real bfloat16 model: Phi, whose head has a bias. A constant in it changes no probability and makes the logits large, as
# those of trained models are, so that the head's rounding is of the size of the tables'.

OFFSET = 1.5
FINE = Variation(head_dtype="float32", rope_dtype="float32")
TRUE_NAMES = {"head in float32": "head_dtype", "rotary tables in float32": "rope_dtype"}


@pytest.fixture(scope="module")
def offset(cache, tmp_path_factory):
    """The Phi miniature in bfloat16 with larger logits, on disk."""
    checkpoint = miniature.make(resolve_model("microsoft/phi-2"), root=cache / "synthetic")
    folder = tmp_path_factory.mktemp("offset")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.path, attn_implementation="eager", dtype=torch.bfloat16
    )
    model.lm_head.bias.data += OFFSET
    model.save_pretrained(folder)
    return folder, model.eval()


def _values(model, completions, variation) -> list[tuple[float, ...]]:
    request = ScoreRequest(completions=tuple(completions), variation=variation)
    return [score.logprobs[0] for score in hf_scores.score(model, request, "cpu", lambda *_: None).scores]


def _drawn(vocabulary: int, count: int, seed: int) -> list[Completion]:
    rows = np.random.default_rng(seed).integers(8, vocabulary, (count, 48)).tolist()
    return [Completion(prompt_ids=tuple(ids[:8]), token_ids=tuple(ids[8:])) for ids in rows]


def _mean_square(model, completions, a, b) -> float:
    d = np.concatenate(_values(model, completions, a)) - np.concatenate(_values(model, completions, b))
    return float(np.square(d).mean())


@pytest.mark.engine
def test_a_bfloat16_head_and_bfloat16_tables_get_their_shares(offset, tmp_path):
    """The trainer has both steps in bfloat16, the rollout in float32; everything else is the same bfloat16 on both sides.

    The truth is measured on other tokens, with the model itself: what is left of the squared error when one of the two
    steps is as in the rollout.
    """
    folder, model = offset
    others = _drawn(model.config.vocab_size, 96, 1)
    start = _mean_square(model, others, FINE, Variation())
    truth = {
        name: 1 - _mean_square(model, others, FINE, replace(Variation(), **{step: "float32"})) / start
        for name, step in TRUE_NAMES.items()
    }
    completions = _drawn(model.config.vocab_size, 48, 0)
    rows = [
        {"prompt_ids": one.prompt_ids, "token_ids": one.token_ids, "rollout_logprobs": values}
        for one, values in zip(completions, _values(model, completions, FINE), strict=True)
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = parity_audit.logprobs(
        "microsoft/phi-2", weights=folder, rollouts=path, dtype="bfloat16", out=tmp_path / "out", target=0.9
    )
    found = report.attribution

    assert found is not None
    assert all(0.1 < share < 0.9 for share in truth.values()), truth
    alone = {effect.name: effect for effect in found.alone}
    for name, share in truth.items():
        low, high = alone[name].interval
        assert low <= share <= high, (name, share, alone[name])
        assert high - low < 0.2
    assert {effect.name for effect in found.proposed} == set(truth)
    assert found.reached
    assert (found.share, found.rmse_left) == (1.0, 0.0)
    assert "in float32 (trainer)" in (tmp_path / "out" / "logprobs.html").read_text()
