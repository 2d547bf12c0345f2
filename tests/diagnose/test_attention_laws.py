"""ALiBi, sinks, temperature, masks and the softmax's arithmetic, with scores in sight and without."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from attend import HEADS, HIDDEN, PROBES, attention, causal
from loose import differ, loose, read
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from parity_audit.formulas.alibi import standard_slopes

SIGHTS = [pytest.param((), id="visible"), pytest.param(HIDDEN, id="hidden")]
SINKS = torch.tensor([0.7, -1.3, 2.1, 0.05], dtype=torch.float64)
ALIBI = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625], dtype=torch.float64)


@pytest.mark.parametrize("heads", [4, 6, 8, 12, 32, 71])
def test_the_usual_slopes_are_those_of_bloom(heads: int):
    bias = build_alibi_tensor(torch.ones(1, 3, dtype=torch.long), heads, torch.float64).reshape(heads, 3)

    assert standard_slopes(heads) == pytest.approx(bias[:, 1].tolist(), rel=1e-6)


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_is_read(hide: tuple[str, ...], absolute: bool, heads: int):
    slopes = torch.tensor(standard_slopes(heads), dtype=torch.float64)

    knobs = read(attention(alibi=slopes, absolute=absolute, hide=hide, heads=heads), "attention")

    assert knobs["attention.alibi"].value == pytest.approx(slopes.tolist(), rel=1e-3)
    assert knobs["attention.scale"].value == pytest.approx(8.0, rel=1e-4)
    assert knobs["attention.mask"].value == "causal"


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize(("wrong", "said"), [(None, None), (ALIBI / 2, ALIBI / 2), (ALIBI.flip(0), ALIBI.flip(0)),
                                             (ALIBI * 1.01, ALIBI * 1.01)])  # fmt: skip
def test_wrong_alibi(hide: tuple[str, ...], wrong: Tensor | None, said: Tensor | None):
    reference = attention(torch.float64, alibi=ALIBI, attention__alibi=True)

    found = differ(attention(alibi=wrong, hide=hide, attention__alibi=True), reference)

    assert found.keys() == {"attention.alibi"}
    expected = said if said is None else pytest.approx(said.tolist(), rel=1e-3)
    assert found["attention.alibi"].candidate_value == expected
    assert found["attention.alibi"].spec_value == pytest.approx(ALIBI.tolist(), rel=1e-6)
    assert found["attention.alibi"].departs_from_spec == "candidate"


@pytest.mark.parametrize("hide", SIGHTS)
def test_alibi_where_there_should_be_none_beside_a_wrong_scale(hide: tuple[str, ...]):
    found = differ(attention(alibi=ALIBI, scale=7.5, hide=hide), attention(torch.float64))

    assert found.keys() == {"attention.alibi", "attention.scale"}
    assert found["attention.scale"].candidate_value == pytest.approx(7.5, rel=1e-4)


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize(
    "law", [{}, {"alibi": ALIBI}, {"sinks": SINKS}, {"cap": 5.0}], ids=["plain", "alibi", "sinks", "cap"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clean(hide: tuple[str, ...], law: dict[str, object], dtype: torch.dtype):
    weights = {"attn.sinks": SINKS.float()} if "sinks" in law else None
    for seed in range(2):
        reference = attention(torch.float64, seed=seed, weights=weights, **law)
        assert differ(attention(dtype, seed=seed, hide=hide, weights=weights, **law), reference) == {}


@pytest.mark.parametrize("hide", SIGHTS)
def test_sinks_are_read(hide: tuple[str, ...]):
    knobs = read(attention(sinks=SINKS, hide=hide), "attention")

    assert knobs["attention.sinks"].value == pytest.approx(SINKS.tolist(), abs=2e-3)
    assert knobs["attention.scale"].value == pytest.approx(8.0, rel=1e-4)


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [(None, None), (torch.zeros(HEADS), "0 in every head (softmax off by one)"), (SINKS.flip(0), SINKS.flip(0))],
)
def test_wrong_sinks(hide: tuple[str, ...], wrong: Tensor | None, said: object):
    extra = {"weights": {"attn.sinks": SINKS.float()}, "attention__sinks": True}

    found = differ(attention(sinks=wrong, hide=hide, **extra), attention(torch.float64, sinks=SINKS, **extra))

    assert found.keys() == {"attention.sinks"}
    assert (found["attention.sinks"].reference_value, found["attention.sinks"].departs_from_spec) == (
        "the checkpoint's", "candidate",
    )  # fmt: skip
    value = found["attention.sinks"].candidate_value
    assert value == (pytest.approx(said.tolist(), abs=5e-3) if isinstance(said, Tensor) else said)


def test_sinks_of_transformers_own_function():
    n, sites = 48, {}
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, n, 32, generator=g) for heads in (4, 2, 2))
    mask = torch.zeros(1, 1, n, n).masked_fill(~causal(n), torch.finfo(torch.float32).min)
    module = SimpleNamespace(num_key_value_groups=2, sinks=SINKS.float(), training=False)
    z, pattern = eager_attention_forward(module, q, k, v, mask, scaling=32**-0.5)
    for site, value in (("rot_q", q), ("rot_k", k), ("v", v)):
        sites[site] = value.transpose(1, 2)
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3)) * 32**-0.5 + mask
    whole = loose(sites | {"z": z, "attn_scores": scores, "pattern": pattern}, weights={"attn.sinks": SINKS.float()})
    hidden = loose(sites | {"z": z}, weights={"attn.sinks": SINKS.float()})

    for side in (whole, hidden):
        knobs = read(side, "attention")
        assert knobs["attention.sinks"].value == "the checkpoint's"
        assert knobs["attention.scale"].value == pytest.approx(32**0.5, rel=1e-4)


def test_another_temperature():
    found = differ(attention(temperature=0.5), attention(torch.float64))

    assert found.keys() == {"attention.temperature"}
    assert found["attention.temperature"].candidate_value == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", ["pattern", "scores", "throughout"])
def test_softmax_in_a_narrow_dtype(dtype: torch.dtype, what: str):
    def low(x: Tensor) -> Tensor:
        return x.to(dtype).to(x.dtype)

    places: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
        "pattern": {"low": low}, "scores": {"low_scores": low}, "throughout": {"low": low, "low_scores": low},
    }  # fmt: skip
    candidate = attention(**places[what])
    if what != "pattern":  # the scores are rounded on their way into the softmax, behind the site
        exact = attention()
        own = candidate[0]
        tensor = own.tensor
        candidate[0] = _with(
            own, lambda p, site: exact[0].tensor(p, site) if site == "attn_scores" else tensor(p, site)
        )

    found = differ(candidate, attention(torch.float64))

    assert found.keys() == {"attention.softmax_dtype"}
    assert found["attention.softmax_dtype"].candidate_value == f"{str(dtype).removeprefix('torch.')} {what}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_stored_in_a_narrow_dtype(dtype: torch.dtype):
    def low(x: Tensor) -> Tensor:
        return x.to(dtype).to(x.dtype)

    name = str(dtype).removeprefix("torch.")
    for rounding, said in (({"low_scores": low}, "scores"), ({"low_scores": low, "low": low}, "throughout")):
        found = differ(attention(**rounding), attention(torch.float64))
        assert found.keys() == {"attention.softmax_dtype"}
        assert found["attention.softmax_dtype"].candidate_value == f"{name} {said}"


def _with(evidence, tensor):
    import dataclasses

    return dataclasses.replace(evidence, tensor=tensor)


def prefix(size: int) -> Callable[[int], Tensor]:
    def mask(n: int) -> Tensor:
        see = causal(n)
        see[:size, :size] = True
        return see

    return mask


def ahead(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril(1)


def strict(n: int) -> Tensor:
    see = torch.ones(n, n, dtype=torch.bool).tril(-1)
    see[0, 0] = True
    return see


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (lambda n: torch.ones(n, n, dtype=torch.bool), "not causal"),
        (ahead, "sees one key ahead"),
        (strict, "hides the query's own key"),
        (prefix(7), "a prefix of 7 tokens sees itself whole"),
    ],
)
def test_masks(hide: tuple[str, ...], mask: Callable[[int], Tensor], said: str):
    found = differ(attention(mask=mask, hide=hide), attention(torch.float64))

    assert found["attention.mask"].candidate_value == said
    assert found.keys() <= {"attention.mask", "attention.window"}


def test_masks_written_as_large_negative_numbers():
    own = attention()[0]
    for value in (-1e4, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min):

        def finite(name: str, site: str, value: float = value) -> Tensor | None:
            x = own.tensor(name, site)
            return None if x is None else x.nan_to_num(neginf=value)

        assert differ({0: _with(own, finite)}, attention(torch.float64)) == {}


@pytest.mark.parametrize("hide", SIGHTS)
def test_a_head_with_its_own_scale(hide: tuple[str, ...]):
    found = differ(attention(scale=[8.0, 8.0, 6.0, 8.0], hide=hide), attention(torch.float64))

    assert found.keys() == {"attention.scale"}
    assert found["attention.scale"].candidate_value == pytest.approx([8.0, 8.0, 6.0, 8.0], rel=1e-4)


@pytest.mark.parametrize("hide", SIGHTS)
def test_the_scale_on_q_is_the_same_function(hide: tuple[str, ...]):
    candidate = attention(scale=1.0, q_times=1 / 8.0, hide=hide)
    # rot_q holds q / 8, so the scores of this port are rot_q.k: they are those of the reference.
    own, other = candidate[0], attention(hide=hide)[0]
    mixed = {0: _with(own, lambda p, s: own.tensor(p, s) if s == "rot_q" else other.tensor(p, s))}

    assert read(mixed, "attention")["attention.scale"].value == pytest.approx(8.0, rel=1e-5)
    assert differ(mixed, attention(torch.float64)) == {}


@pytest.mark.parametrize("hide", SIGHTS)
def test_cap_before_the_scale(hide: tuple[str, ...]):
    finding = differ(attention(cap=30.0, before_scale=True, hide=hide),
                     attention(torch.float64, cap=30.0, attention__softcap=30.0))["attention.softcap"]  # fmt: skip

    assert finding.candidate_value == pytest.approx(30 / 8, rel=1e-3)
    assert finding.evidence["candidate"][0]["a_cap_before_the_scale_of"] == pytest.approx(30, rel=1e-3)


@pytest.mark.parametrize("hide", SIGHTS)
def test_no_division_as_in_gpt_neo(hide: tuple[str, ...]):
    reference = attention(torch.float64, scale=1.0, attention__scale=1.0)
    found = differ(attention(scale=1.0, hide=hide, attention__scale=1.0), reference)
    wrong = differ(attention(scale=32**0.5, hide=hide, attention__scale=1.0), reference)

    assert found == {}
    assert wrong.keys() == {"attention.scale"}
    assert wrong["attention.scale"].candidate_value == pytest.approx(32**0.5, rel=1e-4)


def test_a_model_without_rotation_may_show_q_and_k_only():
    side = attention(hide=("rot_q", "rot_k"))

    assert read(side, "attention")["attention.scale"].value == pytest.approx(8.0, rel=1e-5)
    rotating = attention(hide=("rot_q", "rot_k"), rope__theta=10000.0)
    assert "attention.scale" not in read(rotating, "attention")


@pytest.mark.parametrize("hide", SIGHTS)
def test_k_and_v_with_different_maps(hide: tuple[str, ...]):
    found = differ(attention(k_map=(0, 1, 0, 1), hide=hide), attention(torch.float64))

    assert found.keys() == {"n_kv_heads"}
    assert found["n_kv_heads"].candidate_value == {"k": [0, 1, 0, 1], "v": [0, 0, 1, 1]}


def test_probes_are_as_ragged_as_real_ones():
    assert {row.count(0) for item in PROBES for row in item.mask} >= {0, 17, 31, 18}


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        (torch.tensor([1.0, 0.0, 1.0, 1.0])[:, None], [1.0, 0.0, 1.0, 1.0]),
        (torch.full((4, 1), 0.97), [0.97] * 4),
        (torch.linspace(0.2, 1.0, 32), "a gate per component"),
        (torch.linspace(0.2, 1.0, 48)[:, None, None], "a gate per token"),
    ],
)
def test_what_becomes_of_the_heads(gate: Tensor, said: object):
    found = differ(attention(gate=gate, probes=PROBES[:1]), attention(torch.float64, probes=PROBES[:1]))

    assert found.keys() == {"attention.heads"}
    assert (found["attention.heads"].candidate_value, found["attention.heads"].departs_from_spec) == (said, "candidate")


@pytest.mark.parametrize("law", [{}, {"alibi": ALIBI}, {"cap": 20.0}], ids=["plain", "alibi", "cap"])
@pytest.mark.parametrize(
    ("bias", "said"),
    [
        (lambda d: 0.3 * (d == 0), "+0.3 at distance 0"),
        (lambda d: 0.3 * (d == 0) - 0.2 * (d == 2), "+0.3 at distance 0, -0.2 at distance 2"),
        (lambda d: torch.cos(d.double()), "by distance"),
    ],
)
def test_a_bias_that_depends_on_the_distance(law, bias, said):
    def biased(scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores + bias(torch.arange(n)[:, None] - torch.arange(n)[None]).to(scores)

    # Rows of a batch are padded, so their distances are those of the columns.
    found = differ(attention(low_scores=biased, **law), attention(torch.float64, **law))

    assert found.keys() == {"attention.bias"}
    assert str(found["attention.bias"].candidate_value).startswith(said)
    assert found["attention.bias"].departs_from_spec in ("candidate", "both")
