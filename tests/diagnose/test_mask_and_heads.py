"""The mask in words and the map of query heads to kv heads."""

import pytest
from tiny_port import Port, found

CORE = {"scores", "pattern", "z"}
HIDDEN = ("attn_scores", "pattern")
SIGHTS = [pytest.param((), id="visible"), pytest.param(HIDDEN, id="hidden")]
PORT = Port(cap=50.0, score_std=6.0)


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize(
    ("change", "said"), [({"causal": False}, "not causal"), ({"see_padding": True}, "sees padding")]
)
def test_mask_errors(hide: tuple[str, ...], change: dict[str, bool], said: str):
    finding = found(PORT.but(hide=hide, **change), PORT, CORE)["attention.mask"]

    assert (finding.candidate_value, finding.reference_value, finding.kind) == (said, "causal", "mask")
    assert finding.departs_from_spec == "candidate"


@pytest.mark.parametrize("hide", [(), HIDDEN, ("z",)])
@pytest.mark.parametrize(
    ("heads", "kv", "wrong"),
    [(4, 2, (0, 1, 0, 1)), (6, 3, (0, 1, 2, 0, 1, 2)), (4, 2, (1, 1, 0, 0)), (3, 3, (0, 2, 1))],
)
def test_head_map(hide: tuple[str, ...], heads: int, kv: int, wrong: tuple[int, ...]):
    reference = PORT.but(n_heads=heads, n_kv_heads=kv)

    findings = found(reference.but(kv_map=wrong, hide=hide), reference, CORE)

    assert findings.keys() == {"n_kv_heads"}
    assert findings["n_kv_heads"].candidate_value == list(wrong)
    assert findings["n_kv_heads"].spec_value == [h * kv // heads for h in range(heads)]
    assert findings["n_kv_heads"].departs_from_spec == "candidate"


@pytest.mark.parametrize("hide", [(), HIDDEN, ("z",)])
def test_clean(hide: tuple[str, ...]):
    assert found(PORT.but(hide=hide), PORT, CORE) == {}
