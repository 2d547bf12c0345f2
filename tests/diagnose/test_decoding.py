"""What only decoded tokens get wrong, read off the law that the prompt before them obeys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attend import HIDDEN, attention, causal
from tiny_port import probe

from parity_audit.core.report import Finding
from parity_audit.diagnose.decoding import decoded_probes, identify_decoded, not_in, run_whole
from parity_audit.diagnose.evidence import KnobFit
from parity_audit.diagnose.identify.attention import cached as cached_attention
from parity_audit.diagnose.identify.rotary.positions import where_they_stand

FIRST = 20
DECODED = replace(probe("decode", (28,)), decode_from=FIRST)


def told(mask=causal, side="candidate", **how):
    """What is read off a decoded probe whose attention is computed by hand."""
    evidence = replace(attention(probes=(DECODED,), mask=mask, hide=HIDDEN, **how)[0], side=side)
    return {fit.knob: fit for fit in cached_attention.fit(evidence) if isinstance(fit, KnobFit)}


def later(rule):
    """The causal mask, and from the first decoded token on the rule over (query, key) as well."""

    def mask(n):
        query, key = torch.arange(n)[:, None], torch.arange(n)[None, :]
        return causal(n) & ((query < FIRST) | rule(query, key))

    return mask


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda query, key: key >= 1, "not the first 1"),
        (lambda query, key: key >= 4, "not the first 4"),
        (lambda query, key: query - key < 9, "the last 9"),
        (lambda query, key: query - key < FIRST + 2, "the last 22"),
        (lambda query, key: query != key, "not the token's own"),
        (lambda query, key: key >= FIRST, "none of the prompt"),
        (lambda query, key: (key < FIRST) | (query == key), "none but its own after the prompt"),
    ],
)
def test_keys_that_the_cache_lost(rule, words):
    assert told(later(rule))["cache.keys"].value == words


@pytest.mark.parametrize("how", [{}, {"cap": 20.0}, {"alibi": torch.tensor([0.5, 0.25, 0.125, 0.0625])}])
def test_a_cache_that_is_right_shows_the_prompts_own_law(how):
    fits = told(side="reference", **how)

    assert (fits["cache.keys"].value, fits["cache.dtype"].value) == ("every key", "full")
    assert fits["attention.scale"].value == pytest.approx(8.0, rel=1e-4)


def test_a_head_that_is_gone_everywhere_is_no_sink_of_the_decoded_tokens():
    usual = attention(probes=(DECODED,))[0]

    def tensor(name, site):
        value = None if site in HIDDEN else usual.tensor(name, site)
        return value * torch.tensor([1.0, 0, 1, 1])[:, None] if site == "z" else value

    fits = {
        fit.knob: fit.value for fit in cached_attention.fit(replace(usual, tensor=tensor)) if isinstance(fit, KnobFit)
    }
    assert "attention.sinks" not in fits
    assert fits["cache.keys"] == "every key"


def test_what_is_wrong_with_the_prompt_too_is_no_law_of_decoded_tokens():
    """A bias that z alone does not show: whole runs are asked about it, and a slope would take a part of it."""

    def louder(scores):
        return scores + 0.1 * torch.eye(scores.shape[-1], dtype=scores.dtype)

    fits = told(low_scores=louder)

    assert fits["cache.keys"].value == "every key"
    assert "attention.scale" not in fits


def test_another_scale_from_the_first_decoded_token_on():
    usual, other = attention(probes=(DECODED,))[0], attention(probes=(DECODED,), scale=9.0)[0]
    later = (torch.arange(28) >= FIRST)[None, :, None, None]

    def tensor(name, site):
        if site in HIDDEN:
            return None
        return (
            torch.where(later, other.tensor(name, site), usual.tensor(name, site))
            if site == "z"
            else usual.tensor(name, site)
        )

    fits = {fit.knob: fit for fit in cached_attention.fit(replace(usual, tensor=tensor)) if isinstance(fit, KnobFit)}
    assert "cache.keys" not in fits
    assert fits["attention.scale"].value == pytest.approx(9.0, rel=1e-4)


def test_whole_runs_are_read_without_decoded_probes():
    short = probe("short", (48,))
    layers = attention(probes=(short, DECODED))

    assert decoded_probes((short, DECODED)) == {"decode"}
    assert run_whole(layers)[0].probes == (short,)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ([0, 1, 2, 4, 5], "+1 from token 3 on"),
        ([0, 1, 2, 0, 0], "all at 0 from token 3 on"),
        ([0, 1, 2, 2, 2], "stop at 2"),
        ([0, 1, 2, 0, 1], "start again after 2"),
        ([0, 1, 2, 9, 5], "uneven"),
    ],
)
def test_where_tokens_stand_in_words(own, words):
    assert where_they_stand(torch.arange(5.0), torch.tensor(own, dtype=torch.float64)) == words


def cause(knob, value, layers=None):
    return Finding(
        knob=knob, kind="constant", layers=layers, site="blocks.0.z", reference_value=1.0, candidate_value=value
    )


def test_a_window_that_is_nearly_long_enough_is_not_the_one():
    tries = [("the last 15", 5e-4), ("the last 16", 1.2e-7), ("the last 17", 1e-7), ("keys moved by +1", 1e-7)]

    assert cached_attention.said_of(tries) == ("the last 16", 1.2e-7)
    assert cached_attention.said_of(tries[:1]) == tries[0]


def test_what_whole_runs_say_already_is_not_said_again_of_decoded_tokens():
    whole = [cause("attention.scale", 9.5), cause("norm.eps", 1e-3, layers=(1, 2))]
    decoded = [
        cause("attention.scale", 9.501), cause("norm.eps", 1.001e-3, layers=(2,)), cause("cache.keys", "the last 12"),
    ]  # fmt: skip

    assert [item.knob for item in not_in(whole, decoded)] == ["cache.keys"]
    assert not_in([cause("attention.window", 12)], decoded[2:]) == []
    assert not_in([cause("attention.window", 13)], decoded[2:]) == decoded[2:]
    (other,) = not_in(whole, [cause("attention.scale", 12.0)])
    assert (other.candidate_value, other.evidence["extent"]) == (12.0, "in tokens decoded from the cache")


def test_a_constant_read_off_a_few_tokens_is_the_same_within_its_error():
    def eps(value, stderr):
        return replace(cause("norm.eps", value), evidence={"candidate": [{"stderr": stderr}]})

    assert not_in([eps(1e-3, 1e-6)], [eps(1.2e-3, 1e-4)]) == []
    assert len(not_in([eps(1e-3, 1e-6)], [eps(1.2e-3, 1e-5)])) == 1


def test_a_constant_read_off_decoded_tokens_of_a_narrow_component_is_its_rounding():
    narrow = replace(cause("norm.dtype", "bfloat16 out"), kind="variant", site="blocks.1.ln1.out")
    read = [{"layer": 1, "read_from": "ln1.out"}]
    narrow, eps = (replace(item, evidence={"candidate": read}) for item in (narrow, cause("norm.eps", 0.06)))
    elsewhere = replace(eps, evidence={"candidate": [{"layer": 1, "read_from": "ln2.out"}]})

    assert not_in([narrow], [eps]) == []
    assert not_in([narrow], [elsewhere]) == [elsewhere]


def test_decoded_attention_that_nothing_explains_is_listed_although_whole_runs_have_a_cause():
    evidence, clean = (attention(probes=(DECODED,), mask=causal, hide=HIDDEN)[0] for _ in range(2))

    def noise(probe, site):
        value = evidence.tensor(probe, site)
        if site == "z":
            drawn = torch.randn(value[:, FIRST:].shape, generator=torch.Generator().manual_seed(1))
            value = torch.cat([value[:, :FIRST], drawn.to(value)], dim=1)
        return value

    findings, _ = identify_decoded({0: replace(evidence, tensor=noise)}, {0: clean}, ["blocks.0.z"])
    right, _ = identify_decoded({0: evidence}, {0: clean}, ["blocks.0.z"])

    assert [(item.kind, item.site, item.evidence["extent"]) for item in findings] == [
        ("unexplained", "blocks.0.z", "in tokens decoded from the cache")
    ]
    assert not_in([cause("attention.scale", 9.5)], findings) == findings
    assert right == []
