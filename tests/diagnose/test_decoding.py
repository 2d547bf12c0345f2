"""What only decoded tokens get wrong, read off the law that the prompt before them obeys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attend import HIDDEN, attention, causal
from tiny_port import probe

from parity_audit.core.report import Finding
from parity_audit.diagnose.decoding import (
    decoded_probes,
    identify_decoded,
    not_in,
    run_whole,
    without_unexplained_in_whole_runs,
)
from parity_audit.diagnose.fit.by_token import where_they_stand

FIRST = 20
DECODED = replace(probe("decode", (28,)), decode_from=FIRST)
CONTINUED = replace(probe("continued", (28,), seed=1), decode_from=FIRST, at_once=8)


def told(mask=causal, candidate=None, probes=(DECODED,), **how):
    """What is said of decoded probes whose attention is computed by hand, beside one that is right."""
    side = attention(probes=probes, mask=mask, hide=HIDDEN, **how) if candidate is None else {0: candidate}
    findings, _ = identify_decoded(side, attention(torch.float64, probes=probes, hide=HIDDEN), ["blocks.0.z"])
    return {finding.knob: finding.candidate_value for finding in findings if finding.kind != "unexplained"}


def with_z(evidence, change):
    """The evidence with another z."""
    return replace(
        evidence,
        tensor=lambda name, site: change(evidence.tensor(name, site)) if site == "z" else evidence.tensor(name, site),
    )


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
        (lambda query, key: key <= query - FIRST, "as many of the first as tokens were decoded"),
        (lambda query, key: key == 0, "the first alone"),
    ],
)
def test_keys_that_the_cache_lost(rule, words):
    assert told(later(rule)) == {"cache.keys": words}


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (lambda real: 3, "not the first 3 behind the padding"),
        (lambda real: 3 if real == 28 else 0, "not the first 3"),
    ],
)
def test_the_first_keys_of_padded_rows_are_lost_behind_their_padding_or_with_it(lost, words):
    def mask(real):
        query, key = torch.arange(real)[:, None], torch.arange(real)[None, :]
        return causal(real) & ((query < real - 8) | (key >= lost(real)))

    batch = replace(probe("decode_batch", (28, 21, 15), pad="left"), decode_from=FIRST)

    assert told(mask, probes=(DECODED, batch)) == {"cache.keys": words}


@pytest.mark.parametrize("places", [1, -1, 2, -2])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_values_that_stand_beside_their_keys(part, places):
    """Values one place further and keys one place back are one thing, and so are both moved and none."""
    usual = attention(probes=(DECODED,), hide=HIDDEN)[0]
    q, k, v = (usual.tensor("decode", site).double() for site in ("rot_q", "rot_k", "v"))

    def moved(z):
        z = z.clone()
        for query in range(FIRST, 28):
            keys, values = k[0, : query + 1], v[0, : query + 1]
            keys = keys.roll(-places, 0) if part == "keys" else keys
            values = values.roll(places, 0) if part == "values" else values
            for head in range(4):
                weights = (keys[:, head // 2] @ q[0, query, head] / 8.0).softmax(0)
                z[0, query, head] = (weights @ values[:, head // 2]).to(z)
        return z

    assert told(candidate=with_z(usual, moved)) == {"cache.keys": f"values moved by {places:+d} against their keys"}


@pytest.mark.parametrize("decoded", [DECODED, CONTINUED])
def test_a_cache_that_loses_its_oldest_key_when_it_is_full(decoded):
    """As the cache of windowed layers in transformers 4.51 does: the query that fills its last place, and those of the same step,
    find zeros where the first key was."""
    usual = attention(probes=(decoded,), hide=HIDDEN)[0]
    q, k, v = (usual.tensor(decoded.name, site).double() for site in ("rot_q", "rot_k", "v"))

    def overrun(z):
        z = z.clone()
        for query in range(28 - decoded.at_once, 28):
            keys, values = k[0, : query + 1].clone(), v[0, : query + 1].clone()
            keys[0], values[0] = 0.0, 0.0
            for head in range(4):
                weights = (keys[:, head // 2] @ q[0, query, head] / 8.0).softmax(0)
                z[0, query, head] = (weights @ values[:, head // 2]).to(z)
        return z

    expected = {"cache.keys": "an empty key for the oldest once the cache is full"}
    assert told(candidate=with_z(usual, overrun), probes=(decoded,)) == expected


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("row_of", "words"), [((1, 2, 0), "the next row"), ((0, 0, 0), "the first row"), ((0, 1, 2), None)]
)
def test_a_cache_that_belongs_to_another_row(row_of, words, whole):
    """Every row reads the keys and values of `row_of`, of the prompt alone or of the decoded tokens as well."""
    batch = replace(probe("decode_batch", (28, 28, 28)), decode_from=FIRST)
    usual = attention(probes=(batch,), hide=HIDDEN)[0]
    q, k, v = (usual.tensor("decode_batch", site).double() for site in ("rot_q", "rot_k", "v"))

    def other_rows(x):
        others = x[list(row_of)]
        return others if whole else torch.cat([others[:, :FIRST], x[:, FIRST:]], 1)

    def read(z):
        keys, values = (other_rows(x).repeat_interleave(2, 2) for x in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, keys) / 8.0
        pattern = scores.masked_fill(~causal(28), -torch.inf).softmax(-1)
        own = torch.einsum("bhij,bjhd->bihd", pattern, values).to(z)
        return torch.cat([z[:, :FIRST], own[:, FIRST:]], 1)

    part = "those" if whole else "the prompt"
    expected = {} if words is None else {"cache.keys": f"{part} of {words}"}
    assert told(candidate=with_z(usual, read), probes=(batch,)) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_cache_in_a_narrow_dtype(dtype):
    usual = attention(probes=(DECODED,), hide=HIDDEN)[0]
    q, k, v = (usual.tensor("decode", site).double() for site in ("rot_q", "rot_k", "v"))
    k, v = (x.to(getattr(torch, dtype)).double() for x in (k, v))

    def rounded(z):
        scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 8.0
        pattern = scores.masked_fill(~causal(28), -torch.inf).softmax(-1)
        own = torch.einsum("bhij,bjhd->bihd", pattern, v.repeat_interleave(2, 2)).to(z)
        return torch.cat([z[:, :FIRST], own[:, FIRST:]], 1)

    assert told(candidate=with_z(usual, rounded)) == {"cache.dtype": dtype}


@pytest.mark.parametrize("how", [{}, {"cap": 20.0, "attention__softcap": 20.0}])
def test_a_cache_that_is_right_has_no_finding(how):
    side = attention(probes=(DECODED,), hide=HIDDEN, **how)

    assert (
        identify_decoded(side, attention(torch.float64, probes=(DECODED,), hide=HIDDEN, **how), ["blocks.0.z"])[0] == []
    )


def test_another_scale_from_the_first_decoded_token_on():
    usual, other = (attention(probes=(DECODED,), scale=scale, hide=HIDDEN)[0] for scale in (8.0, 9.0))
    z = other.tensor("decode", "z")

    found = told(candidate=with_z(usual, lambda x: torch.cat([x[:, :FIRST], z[:, FIRST:]], 1)))

    assert found == {"attention.scale": pytest.approx(9.0, rel=1e-4)}


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
        ([0, 1, 2, 9, 5], None),
    ],
)
def test_where_tokens_stand_in_words(own, words):
    assert where_they_stand(torch.arange(5), torch.tensor(own)) == words


def cause(knob, value, layers=None):
    return Finding(
        knob=knob, kind="constant", layers=layers, site="blocks.0.z", reference_value=1.0, candidate_value=value
    )


def test_what_whole_runs_say_already_is_not_said_again_of_decoded_tokens():
    whole = [cause("attention.scale", 9.5), cause("norm.eps", 1e-3, layers=(1, 2))]
    decoded = [
        cause("attention.scale", 9.501), cause("norm.eps", 1.001e-3, layers=(2,)), cause("cache.keys", "the last 12"),
    ]  # fmt: skip

    assert [item.knob for item in not_in(whole, decoded, {"z"})] == ["cache.keys"]
    (other,) = not_in(whole, [cause("attention.scale", 12.0)], {"z"})
    assert (other.candidate_value, other.evidence["extent"]) == (12.0, "in tokens decoded from the cache")
    (alone,) = not_in(whole, [cause("rope.theta", 12.0)], suspects=set())
    assert alone.evidence["extent"] == "in tokens decoded from the cache"


def test_a_constant_read_off_a_few_tokens_is_the_same_within_its_error():
    def eps(value, stderr):
        return replace(cause("norm.eps", value), evidence={"candidate": [{"stderr": stderr}]})

    assert not_in([eps(1e-3, 1e-6)], [eps(1.2e-3, 1e-4)], {"z"}) == []
    assert len(not_in([eps(1e-3, 1e-6)], [eps(1.2e-3, 1e-5)], {"z"})) == 1


def test_a_constant_read_off_decoded_tokens_of_a_narrow_component_is_its_rounding():
    narrow = replace(cause("norm.dtype", "bfloat16 out"), kind="variant", site="blocks.1.ln1.out")
    read = [{"layer": 1, "read_from": "ln1.out"}]
    narrow, eps = (replace(item, evidence={"candidate": read}) for item in (narrow, cause("norm.eps", 0.06)))
    elsewhere = replace(eps, evidence={"candidate": [{"layer": 1, "read_from": "ln2.out"}]})

    assert not_in([narrow], [eps], {"norm"}) == []
    assert not_in([narrow], [elsewhere], {"norm", "z"}) == [elsewhere]


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
    assert not_in([cause("attention.scale", 9.5)], findings, set()) == findings
    assert right == []


def in_each(**sides):
    """One side, made of another one for each probe."""
    every = next(iter(sides.values()))
    return {0: replace(every, tensor=lambda name, site: sides[name].tensor(name, site))}


def where_said(candidate, whole=()):
    """Knob, value and extent of what is said of both kinds of decoded probes."""
    true = attention(torch.float64, probes=(DECODED, CONTINUED), hide=HIDDEN)
    findings, gaps = identify_decoded(candidate, true, ["blocks.0.z"], whole)
    assert gaps == []
    return [(item.knob, item.candidate_value, item.evidence.get("extent")) for item in findings]


def test_steps_of_one_token_and_of_several_may_have_a_fault_each():
    lost, moved = (
        attention(probes=(DECODED, CONTINUED), mask=later(rule), hide=HIDDEN)[0]
        for rule in (lambda query, key: key >= 4, lambda query, key: query - key < 9)
    )

    assert where_said(in_each(decode=lost, continued=moved)) == [
        ("cache.keys", "not the first 4", "in tokens decoded from the cache one at a time"),
        ("cache.keys", "the last 9", "in tokens decoded from the cache several at a time"),
    ]


def test_steps_that_a_cause_of_whole_runs_explains_hide_nothing_of_the_others():
    lost, usual = (
        attention(probes=(DECODED, CONTINUED), scale=9.0, mask=mask, hide=HIDDEN)[0]
        for mask in (later(lambda query, key: key >= 4), causal)
    )
    facts = {"candidate": [{"explained_by": "formula", "layer": 0, "read_from": "z"}]}
    whole = [replace(cause("attention.scale", 9.0), evidence=facts)]

    only = "in tokens decoded from the cache one at a time"
    assert where_said(in_each(decode=lost, continued=usual), whole) == [
        ("attention.scale", 9.0, only), ("cache.keys", "not the first 4", only),
    ]  # fmt: skip


def test_beside_wrong_weights_of_whole_runs_decoded_tokens_are_read():
    """A constant and the weights of one layer are no setting of one formula."""
    own = attention(probes=(DECODED, CONTINUED), scale=9.0, mask=causal, hide=HIDDEN)[0]
    facts = {"candidate": [{"explained_by": "formula", "layer": 0, "read_from": "z"}]}
    whole = [
        replace(cause(knob, value), evidence=facts)
        for knob, value in (("attention.scale", 9.0), ("weights.attn.o.scale", 0.8))
    ]

    assert where_said({0: own}, whole) == []


def test_what_whole_runs_leave_unexplained_is_not_explained_by_single_tokens():
    """A softmax over tokens is 1 for a token by itself, which equal weights of the experts would explain."""
    decoded = [f"blocks.{layer}.{name}" for layer in (0, 1) for name in ("mlp.router_weights", "z", "q")]
    whole = ["blocks.0.mlp.router_weights", "blocks.1.pattern"]

    assert without_unexplained_in_whole_runs(decoded, whole, []) == [
        "blocks.0.z", "blocks.0.q", "blocks.1.mlp.router_weights", "blocks.1.q",
    ]  # fmt: skip
    assert without_unexplained_in_whole_runs(decoded, [], []) == decoded
