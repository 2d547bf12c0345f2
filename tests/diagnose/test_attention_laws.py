"""ALiBi, sinks, temperature, masks and the softmax's arithmetic, with scores in sight and without."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from attend import HEADS, HIDDEN, PROBES, attention, causal
from loose import departing, loose, told
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from parity_audit.diagnose.fitting import identify_by_formula
from parity_audit.formulas.alibi import standard_slopes

CORE = {"rope", "scores", "pattern", "z"}
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

    knobs = departing(attention(alibi=slopes, absolute=absolute, hide=hide, heads=heads))

    assert knobs.keys() == {"attention.alibi"}
    assert knobs["attention.alibi"].value == 1.0


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize(("wrong", "said"), [(None, None), (ALIBI / 2, 0.5), (ALIBI.flip(0), ALIBI.flip(0).tolist()),
                                             (ALIBI * 1.01, 1.01)])  # fmt: skip
def test_wrong_alibi(hide: tuple[str, ...], wrong: Tensor | None, said: object):
    reference = attention(torch.float64, alibi=ALIBI, attention__alibi=True)

    found = told(attention(alibi=wrong, hide=hide, attention__alibi=True), reference)

    assert found.keys() == {"attention.alibi"}
    assert found["attention.alibi"].candidate_value == (said if said is None else pytest.approx(said, rel=1e-3))
    assert found["attention.alibi"].spec_value == (pytest.approx(ALIBI.tolist()) if isinstance(said, list) else 1.0)
    assert found["attention.alibi"].departs_from_spec == "candidate"


@pytest.mark.parametrize("hide", SIGHTS)
def test_alibi_where_there_should_be_none_beside_a_wrong_scale(hide: tuple[str, ...]):
    found = told(attention(alibi=ALIBI, scale=7.5, hide=hide), attention(torch.float64))

    assert found.keys() == {"attention.alibi", "attention.scale"}
    assert found["attention.scale"].candidate_value == pytest.approx(7.5, rel=1e-4)


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize(
    "law",
    [
        {},
        {"alibi": ALIBI, "attention__alibi": True},
        {"sinks": SINKS, "attention__sinks": True},
        {"cap": 5.0, "attention__softcap": 5.0},
    ],
    ids=["plain", "alibi", "sinks", "cap"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clean(hide: tuple[str, ...], law: dict[str, object], dtype: torch.dtype):
    weights = {"attn.sinks": SINKS.float()} if "sinks" in law else None
    for seed in range(2):
        reference = attention(torch.float64, seed=seed, weights=weights, **law)
        assert told(attention(dtype, seed=seed, hide=hide, weights=weights, **law), reference) == {}


@pytest.mark.parametrize("hide", SIGHTS)
def test_sinks_are_read(hide: tuple[str, ...]):
    knobs = departing(attention(sinks=SINKS, hide=hide, weights={"attn.sinks": SINKS.flip(0).float()}))

    assert knobs.keys() == {"attention.sinks"}
    assert knobs["attention.sinks"].value == pytest.approx(SINKS.tolist(), abs=2e-3)


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [(None, None), (torch.zeros(HEADS), "0 in every head (softmax off by one)"), (SINKS.flip(0), SINKS.flip(0)),
     (2 * SINKS, "the checkpoint's times 2")],
)  # fmt: skip
def test_wrong_sinks(hide: tuple[str, ...], wrong: Tensor | None, said: object):
    extra = {"weights": {"attn.sinks": SINKS.float()}, "attention__sinks": True}

    found = told(attention(sinks=wrong, hide=hide, **extra), attention(torch.float64, sinks=SINKS, **extra))

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
        knobs = departing(side)
        assert knobs.keys() == {"attention.sinks"}
        assert knobs["attention.sinks"].value == "the checkpoint's"


def test_another_temperature():
    found = told(attention(temperature=0.5), attention(torch.float64))

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

    found = told(candidate, attention(torch.float64))

    assert found.keys() == {"attention.softmax_dtype"}
    assert found["attention.softmax_dtype"].candidate_value == f"{str(dtype).removeprefix('torch.')} {what}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_stored_in_a_narrow_dtype(dtype: torch.dtype):
    def low(x: Tensor) -> Tensor:
        return x.to(dtype).to(x.dtype)

    name = str(dtype).removeprefix("torch.")
    for rounding, said in (({"low_scores": low}, "scores"), ({"low_scores": low, "low": low}, "throughout")):
        found = told(attention(**rounding), attention(torch.float64))
        assert found.keys() == {"attention.softmax_dtype"}
        assert found["attention.softmax_dtype"].candidate_value == f"{name} {said}"


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_queries_and_keys_in_a_narrow_dtype(dtype: torch.dtype, hide: tuple[str, ...]):
    def low(x: Tensor) -> Tensor:
        return x.to(dtype).to(x.dtype)

    name = str(dtype).removeprefix("torch.")
    places: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
        "products": {"low_products": low}, "inputs": {"low_inputs": low},
        "throughout": {"low_products": low, "low_inputs": low},
    }  # fmt: skip
    for said, rounding in places.items():
        shown = {"scale": 6.0, "hide": hide, "attention__scale": 6.0}
        found = told(attention(**rounding, **shown), attention(torch.float64, **shown))
        assert {knob: one.candidate_value for knob, one in found.items()} == {
            "attention.scores_dtype": f"{name} {said}"
        }


def test_products_divided_by_a_power_of_two_round_as_scores():
    def low(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype)

    found = told(attention(low_products=low), attention(torch.float64))
    assert found.keys() == {"attention.softmax_dtype"}

    capped = {"cap": 5.0, "attention__softcap": 5.0}
    found = told(attention(low_products=low, **capped), attention(torch.float64, **capped))
    assert found["attention.scores_dtype"].candidate_value == "bfloat16 products"


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
    found = told(attention(mask=mask, hide=hide), attention(torch.float64))

    assert found["attention.mask"].candidate_value == said
    assert found.keys() <= {"attention.mask", "attention.window"}


def test_masks_written_as_large_negative_numbers():
    own = attention()[0]
    for value in (-1e4, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min):

        def finite(name: str, site: str, value: float = value) -> Tensor | None:
            x = own.tensor(name, site)
            return None if x is None else x.nan_to_num(neginf=value)

        assert told({0: _with(own, finite)}, attention(torch.float64)) == {}


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize(
    ("masked", "said"),
    [
        (lambda s: s - 8.0, "kept, less 8"),
        (lambda s: s - 3.5, "kept, less 3.5"),
        (lambda s: torch.full_like(s, -5.0), "kept as -5"),
    ],
)
def test_masks_of_a_finite_number(hide: tuple[str, ...], masked: Callable[[Tensor], Tensor], said: str):
    found = told(attention(masked=masked, hide=hide), attention(torch.float64))

    assert {knob: item.candidate_value for knob, item in found.items()} == {"attention.masked": said}


def test_a_mask_in_front_of_a_soft_cap():
    reference = attention(torch.float64, cap=30.0, attention__softcap=30.0)

    found = told(attention(cap=30.0, masked=lambda s: torch.full_like(s, -30.0), attention__softcap=30.0), reference)

    assert {knob: item.candidate_value for knob, item in found.items()} == {"attention.masked": "kept as -30"}


def test_a_window_that_keeps_the_first_keys_in_sight():
    """Streaming with attention sinks: neither number alone leaves rounding."""

    def mask(n: int) -> Tensor:
        near = torch.ones(n, n, dtype=torch.bool).triu(-8)
        return causal(n) & (near | (torch.arange(n) < 3))

    found = told(attention(mask=mask), attention(torch.float64))

    assert {knob: item.candidate_value for knob, item in found.items()} == {
        "attention.window": 9,
        "attention.window_first": 3,
    }


@pytest.mark.parametrize("hide", SIGHTS)
def test_a_head_with_its_own_scale(hide: tuple[str, ...]):
    found = told(attention(scale=[8.0, 8.0, 6.0, 8.0], hide=hide), attention(torch.float64))

    assert found.keys() == {"attention.scale"}
    assert found["attention.scale"].candidate_value == pytest.approx([8.0, 8.0, 6.0, 8.0], rel=1e-4)


@pytest.mark.parametrize("hide", SIGHTS)
def test_the_scale_on_q_is_the_same_function(hide: tuple[str, ...]):
    candidate = attention(scale=1.0, q_times=1 / 8.0, hide=hide)
    # rot_q holds q / 8, so the scores of this port are rot_q.k: they are those of the reference.
    own, other = candidate[0], attention(hide=hide)[0]
    mixed = {0: _with(own, lambda p, s: own.tensor(p, s) if s == "rot_q" else other.tensor(p, s))}

    findings, _ = identify_by_formula(mixed, attention(torch.float64), CORE)

    assert {finding.candidate_value for finding in findings} <= {"on queries"}
    assert told(mixed, attention(torch.float64)) == {}


@pytest.mark.parametrize("hide", SIGHTS)
def test_cap_before_the_scale(hide: tuple[str, ...]):
    found = told(attention(cap=30.0, before_scale=True, hide=hide, attention__softcap=30.0),
                   attention(torch.float64, cap=30.0, attention__softcap=30.0))  # fmt: skip

    assert found.keys() == {"attention.softcap"}
    assert found["attention.softcap"].candidate_value == pytest.approx(30 / 8, rel=1e-3)


@pytest.mark.parametrize("hide", SIGHTS)
def test_no_division_as_in_gpt_neo(hide: tuple[str, ...]):
    reference = attention(torch.float64, scale=1.0, attention__scale=1.0)
    found = told(attention(scale=1.0, hide=hide, attention__scale=1.0), reference)
    wrong = told(attention(scale=32**0.5, hide=hide, attention__scale=1.0), reference)

    assert found == {}
    assert wrong.keys() == {"attention.scale"}
    assert wrong["attention.scale"].candidate_value == pytest.approx(32**0.5, rel=1e-4)


def test_a_model_without_rotation_may_show_q_and_k_only():
    side = attention(hide=("rot_q", "rot_k"))

    found = told(attention(scale=9.0, hide=("rot_q", "rot_k")), side)

    assert found.keys() == {"attention.scale"}
    assert found["attention.scale"].candidate_value == pytest.approx(9.0, rel=1e-5)


@pytest.mark.parametrize("hide", SIGHTS)
def test_k_and_v_with_different_maps(hide: tuple[str, ...]):
    found = told(attention(k_map=(0, 1, 0, 1), hide=hide), attention(torch.float64))

    assert found.keys() == {"n_kv_heads"}
    assert found["n_kv_heads"].candidate_value == {"k": [0, 1, 0, 1], "v": [0, 0, 1, 1]}


def test_probes_are_as_ragged_as_real_ones():
    assert {row.count(0) for item in PROBES for row in item.mask} >= {0, 17, 31, 18}


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        (torch.tensor([1.0, 0.0, 1.0, 1.0])[:, None], [1.0, 0.0, 1.0, 1.0]),
        (torch.full((4, 1), 0.97), 0.97),
    ],
)
def test_what_becomes_of_the_heads(gate: Tensor, said: object):
    found = told(attention(gate=gate, probes=PROBES[:1]), attention(torch.float64, probes=PROBES[:1]))

    assert found.keys() == {"attention.heads"}
    assert (found["attention.heads"].candidate_value, found["attention.heads"].departs_from_spec) == (said, "candidate")


@pytest.mark.parametrize(
    "law",
    [{}, {"alibi": ALIBI, "attention__alibi": True}, {"cap": 20.0, "attention__softcap": 20.0}],
    ids=["plain", "alibi", "cap"],
)
@pytest.mark.parametrize(
    ("bias", "said"),
    [
        (lambda d: 0.3 * (d == 0), {"distance 0": 0.3}),
        (lambda d: 0.3 * (d == 0) - 0.2 * (d == 2), {"distance 0": 0.3, "distance 2": -0.2}),
        (lambda d: torch.cos(d.double()), {f"distance {d}": math.cos(d) for d in range(48)}),
    ],
)
def test_a_bias_that_depends_on_the_distance(law, bias, said):
    def biased(scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores + bias(torch.arange(n)[:, None] - torch.arange(n)[None]).to(scores)

    # Rows of a batch are padded, so their distances are those of the columns.
    found = told(attention(low_scores=biased, absolute=True, **law), attention(torch.float64, absolute=True, **law))

    assert found.keys() == {"attention.bias"}
    assert found["attention.bias"].candidate_value == pytest.approx(said, rel=1e-3, abs=1e-5)
    assert found["attention.bias"].departs_from_spec == "candidate"
