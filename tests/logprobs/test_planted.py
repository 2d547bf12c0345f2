"""Rollouts with a known fault, made by a transformers model that has it, and what `logprobs` says of them.

The completions are fixed draws; the fault is in how their log-probabilities were computed. The whole path runs: file,
workers, judge, verdict, causes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import parity_audit
from parity_audit.backends import hf_scores
from parity_audit.core.errors import NotJudged
from parity_audit.core.report import Verdict
from parity_audit.core.rollouts import Completion, Sampling, ScoreRequest, Variation

pytestmark = pytest.mark.engine
BOS, EOS = 2, 1
MODEL = "meta-llama/Llama-3.2-1B"


@pytest.fixture(scope="module")
def model(llama):
    return transformers.AutoModelForCausalLM.from_pretrained(llama.path, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def completions(model) -> tuple[Completion, ...]:
    """Eight completions whose prompts begin with BOS, with an end-of-sequence token inside each."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(8, model.config.vocab_size, (8, 40)).tolist()
    return tuple(Completion(prompt_ids=(BOS, *ids[:12], EOS, *ids[12:16]), token_ids=tuple(ids[16:])) for ids in drawn)


def _logprobs(model, completions, *, temperature=1.0, truncation=None, variation=Variation()) -> list[list[float]]:  # noqa: B008
    request = ScoreRequest(
        completions=tuple(completions), temperatures=(temperature,), truncation=truncation, variation=variation
    )
    reply = hf_scores.score(model, request, "cpu", lambda *_: None)
    rows = [np.array(score.logprobs[0]) - np.array(score.log_kept or 0.0) for score in reply.scores]
    return [row.tolist() for row in rows]


def _file(path: Path, completions, rollout, train=None) -> Path:
    rows = [
        {"prompt_ids": one.prompt_ids, "token_ids": one.token_ids, "rollout_logprobs": a, "train_logprobs": b}
        for one, a, b in zip(completions, rollout, train or [None] * len(rollout), strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _report(path: Path, sampling: Sampling | None = None):
    return parity_audit.logprobs(MODEL, miniature="mini", rollouts=path, sampling=sampling, out=path.parent / "out")


def test_clean_rollouts_are_at_parity_and_every_file_is_written(model, completions, tmp_path):
    own = _logprobs(model, completions)
    report = _report(_file(tmp_path / "a.jsonl", completions, own, own))

    assert (report.verdict, report.exit_code, report.findings) == (Verdict.PARITY, 0, ())
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "logprobs.json", "logprobs.html", "tokens.jsonl", "tokens.csv",
    }  # fmt: skip
    assert json.loads((tmp_path / "out" / "logprobs.json").read_text())["verdict"] == "parity"
    assert all(row.before for row in report.worst)
    assert any(row.text for row in report.worst)


@pytest.mark.parametrize(
    ("name", "variation"),
    [
        ("head.dtype", Variation(head_dtype="bfloat16")),
        ("rope.dtype", Variation(rope_dtype="bfloat16")),
        ("tokens.eos_is_pad", Variation(hidden_tokens=(EOS,))),
    ],
)
def test_a_step_of_the_rollout_that_differs_is_named(name, variation, model, completions, tmp_path):
    wrong = _logprobs(model, completions, variation=variation)
    report = _report(_file(tmp_path / "a.jsonl", completions, wrong))

    assert [(finding.name, finding.leg) for finding in report.findings] == [(name, "engine-decode")]
    assert (report.verdict, report.odd_leg, report.exit_code) == (Verdict.MISMATCH, "engine-decode", 1)


def test_the_trainer_is_blamed_for_what_the_trainer_does(model, completions, tmp_path):
    right = _logprobs(model, completions)
    wrong = _logprobs(model, completions, variation=Variation(hidden_tokens=(EOS,)))
    report = _report(_file(tmp_path / "a.jsonl", completions, right, wrong))

    assert [(finding.name, finding.leg) for finding in report.findings] == [("tokens.eos_is_pad", "trainer")]
    assert report.odd_leg == "trainer"


def test_a_second_bos_that_only_the_engine_saw(model, completions, tmp_path):
    wrong = _logprobs(model, [replace(one, prompt_ids=(BOS, *one.prompt_ids)) for one in completions])
    report = _report(_file(tmp_path / "a.jsonl", completions, wrong))

    assert [finding.name for finding in report.findings] == ["tokens.bos_twice"]


def test_prompts_that_took_the_way_over_text(model, llama, completions, tmp_path):
    """The engine was given the prompt's text, and its tokenizer cut that into other ids."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama.path)
    drifted = [
        replace(
            one, prompt_ids=tuple(tokenizer(tokenizer.decode(one.prompt_ids), add_special_tokens=False)["input_ids"])
        )
        for one in completions
    ]
    assert any(a.prompt_ids != b.prompt_ids for a, b in zip(drifted, completions, strict=True))
    report = _report(_file(tmp_path / "a.jsonl", completions, _logprobs(model, drifted)))

    assert [(finding.name, finding.leg) for finding in report.findings] == [("tokens.retokenised", "engine-decode")]


@pytest.mark.parametrize(
    ("prompt", "tokens", "code"),
    [((BOS, 5), (10**6,) * 40, "vocabulary"), ((10**6,), (5,) * 40, "vocabulary"), ((), (5,) * 40, "no-prompt")],
)
def test_rollouts_of_another_model_are_refused_before_any_leg_runs(prompt, tokens, code, tmp_path):
    path = _file(tmp_path / "a.jsonl", [Completion(prompt_ids=prompt, token_ids=tokens)], [[-1.0] * 40])
    with pytest.raises(NotJudged) as caught:
        _report(path)

    assert caught.value.code == code


def test_raw_numbers_of_tokens_drawn_at_another_temperature(model, completions, tmp_path):
    raw = _logprobs(model, completions)
    report = _report(_file(tmp_path / "a.jsonl", completions, raw), Sampling(temperature=0.7))

    assert [(finding.name, finding.leg) for finding in report.findings] == [("logprobs.temperature", "engine-decode")]
    assert report.findings[0].settings == {}  # a file does not say which engine made it
    assert all(setting in report.findings[0].hint for setting in ("logprobs_mode", "return_original_logprob"))
    assert "temperature 1 " in report.pairs[0].meaning
    assert report.pairs[0].metrics["rmse_dlogp"] < 1e-5  # compared with the trainer's value of the same quantity


def test_numbers_renormalised_over_the_kept_tokens(model, completions, tmp_path):
    cut = _logprobs(model, completions, truncation=(0.9, 0, 1.0))
    report = _report(_file(tmp_path / "a.jsonl", completions, cut), Sampling(top_p=0.9))

    assert [finding.name for finding in report.findings] == ["sampling.truncation"]


def test_an_error_of_no_known_kind_is_called_unexplained(model, completions, tmp_path):
    rng = np.random.default_rng(1)
    wrong = [(np.array(row) - 0.01 * rng.random(len(row))).tolist() for row in _logprobs(model, completions)]
    report = _report(_file(tmp_path / "a.jsonl", completions, wrong))

    assert [finding.name for finding in report.findings] == ["unexplained"]
    assert report.exit_code == 1


def test_the_live_model_is_as_before_after_a_variation(model, completions):
    before = _logprobs(model, completions)
    _logprobs(model, completions, variation=Variation(head_dtype="bfloat16", rope_dtype="bfloat16"))

    assert _logprobs(model, completions) == before
    assert torch.get_default_dtype() == torch.float32
