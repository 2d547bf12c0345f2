"""Embedding scale, activation and gate, logits: scale, cap, centring."""

import pytest
import torch
from loose import SHORT, differ, loose
from tiny_port import ACTS, Port, found

PORT = Port(logit_cap=30.0)


@pytest.mark.parametrize("scale", [1.0, 9.75, 47.3])
def test_embedding_scale(scale: float):
    finding = found(PORT.but(embed_scale=scale), PORT, {"embed"})["embed.scale"]

    assert finding.candidate_value == pytest.approx(scale, rel=1e-6)
    assert (finding.reference_value, finding.departs_from_spec) == (pytest.approx(9.797959, rel=1e-6), "candidate")


def test_rounding_of_the_scale_to_bfloat16_is_no_finding():
    assert found(PORT.but(dtype=torch.bfloat16), PORT, {"embed"}) == {}


@pytest.mark.parametrize(("ids", "says"), [
    (lambda ids: ids + 1, "those of token id +1"),
    (lambda ids: torch.where(ids == ids.flatten()[3], 5, ids), None),
])  # fmt: skip
def test_rows_of_other_tokens(ids, says):
    table = torch.randn(131, 64, generator=torch.Generator().manual_seed(2))
    own = torch.tensor(SHORT[0].token_ids)

    def side(rows):
        return loose({"embed": 3.0 * table[rows % 131]}, weights={"embed": table}, probes=SHORT[:1], layer=None)

    value = differ(side(ids(own)), side(own))["embed.rows"].candidate_value
    moved = int((ids(own) != own).sum())
    assert value == (says or f"another's for {moved} of {own.numel()} tokens")


def test_rows_that_are_nobodys_are_not_named():
    table, other = torch.randn(2, 131, 64, generator=torch.Generator().manual_seed(2))
    own = torch.tensor(SHORT[0].token_ids)
    sides = [
        loose({"embed": rows[own]}, weights={"embed": table}, probes=SHORT[:1], layer=None) for rows in (other, table)
    ]

    assert differ(*sides) == {}


@pytest.mark.parametrize("act", sorted(ACTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation(act: str, dtype: torch.dtype):
    other = "silu" if act.startswith("relu") else "relu2"
    finding = found(PORT.but(act=act, dtype=dtype), PORT.but(act=other), {"mlp"})["mlp.activation"]

    # In bf16 the two GELUs may be closer than rounding: then both are named.
    assert act in (finding.candidate_value, *finding.evidence.get("tied_with", []))
    assert finding.reference_value == other


@pytest.mark.parametrize("act", ["gelu", "silu", "relu2"])
def test_wrong_activation_in_one_layer(act: str):
    finding = found(PORT.but(act=("gelu_pytorch_tanh", act)), PORT, {"mlp"})["mlp.activation"]

    assert (finding.layers, finding.candidate_value, finding.reference_value) == ((1,), act, "gelu_pytorch_tanh")


def test_gate_and_up_swapped():
    findings = found(PORT.but(swapped=True), PORT, {"mlp"})

    assert findings.keys() == {"mlp.gate_up"}
    assert findings["mlp.gate_up"].candidate_value == "up activated"


@pytest.mark.parametrize("alias", ["gelu_new", "gelu_fast"])
def test_two_names_of_one_function_are_the_same(alias: str):
    assert found(PORT, PORT, {"mlp"}, mlp__activation=alias) == {}


@pytest.mark.parametrize(("cap", "scale"), [(None, 1.0), (20.0, 1.0), (30.0, 0.0625), (41.0, 1.3)])
def test_logit_cap_and_scale(cap: float | None, scale: float):
    findings = found(PORT.but(logit_cap=cap, logit_scale=scale), PORT, {"logits"}, logits__scale=1.0)

    if cap != 30.0:
        assert findings["logits.softcap"].candidate_value == (cap and pytest.approx(cap, rel=1e-4))
    if scale != 1.0:
        assert findings["logits.scale"].candidate_value == pytest.approx(scale, rel=1e-4)
    assert "logits.shift" not in findings


@pytest.mark.parametrize("cap", [None, 30.0])
def test_logits_that_are_cut_off_where_a_cap_would_bend_them(cap: float | None):
    findings = found(PORT.but(logit_cap=None, logit_clamp=0.8), PORT.but(logit_cap=cap), {"logits"})

    assert findings.keys() == {"logits.softcap"}
    said = findings["logits.softcap"].candidate_value
    assert said.startswith("clamped at ")
    assert float(said.removeprefix("clamped at ")) == pytest.approx(0.8, rel=1e-4)
    assert findings["logits.softcap"].reference_value == cap


@pytest.mark.parametrize("cap", [None, 30.0])
def test_centring(cap: float | None):
    findings = found(PORT.but(logit_cap=cap, centred=True), PORT.but(logit_cap=cap), {"logits"})

    assert findings.keys() == {"logits.shift"}
    assert findings["logits.shift"].candidate_value == "centred"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_clean(dtype: torch.dtype, cap: float | None):
    for seed in range(3):
        reference = PORT.but(seed=seed, logit_cap=cap, dtype=torch.float64)
        assert found(reference.but(dtype=dtype), reference, {"embed", "mlp", "logits"}) == {}
