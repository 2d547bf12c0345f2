"""Attention computed some queries at a time, over the keys that they see alone, is attention computed at once."""

import pytest
import torch

from parity_audit.formulas import in_attention
from parity_audit.formulas.choices import AS_MINUS, AT_DISTANCE, LAWS, LESS, MASKS
from parity_audit.formulas.decoder import Run
from parity_audit.formulas.place import Batch, Decoder

D, TOKENS = 8, 40
WEIGHTS = {
    role: torch.randn(D, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for seed, role in enumerate(("attn.q", "attn.k", "attn.v", "attn.o"))
} | {"norm.ln1": torch.ones(D), "attn.sinks": torch.tensor([0.3, -0.2])}
STREAM = torch.randn(2, TOKENS, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
MASK = torch.ones(2, TOKENS, dtype=torch.long)
PADDED = torch.cat([torch.zeros(2, 9, dtype=torch.long), MASK[:, 9:]], 1)


def z(values: dict[str, object], mask: torch.Tensor) -> torch.Tensor:
    usual = {"norm.eps": 1e-5, "attention.scale": 2.0, "rope.theta": None}
    decoder = Decoder(
        dims={"n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "d_head": 4, "d_model": D},
        values={name: [value] for name, value in (usual | values).items()},
        weights=lambda layer, role: WEIGHTS.get(role),
    )  # fmt: skip
    tokens = torch.arange(TOKENS).expand(2, -1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    batch = Batch(tokens=tokens, mask=mask, positions=positions)
    made = Run(decoder=decoder, batch=batch, given={"blocks.0.resid_pre": STREAM}.get).computed("blocks.0.z")
    return made[mask.bool()]


@pytest.mark.parametrize("mask", [MASK, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "values",
    [
        {}, {"attention.window": 5}, {"attention.window": 5, "attention.window_first": 2}, {"attention.chunk": 6},
        {"attention.softcap": 1.5}, {"attention.alibi": 1.0}, {"attention.sinks": True},
        {"attention.bias": {f"{AT_DISTANCE}3": 0.5}},
        *({"attention.masked": how.format(2.0)} for how in (LESS, AS_MINUS)),
        *({"attention.weights": law} for law in LAWS), *({"attention.mask": kind} for kind in MASKS),
    ],
    ids=str,
)  # fmt: skip
def test_rows_at_a_time_give_what_all_rows_give(values, mask, monkeypatch):
    at_once = z(values, mask)
    asked: list[int] = []
    weighted = in_attention.attention.weighted_values
    monkeypatch.setattr(in_attention, "QUERY_ROWS", 7)
    monkeypatch.setattr(
        in_attention.attention, "weighted_values",
        lambda pattern, v, heads: (asked.append(pattern.shape[-1]), weighted(pattern, v, heads))[1],
    )  # fmt: skip

    assert torch.allclose(z(values, mask), at_once, rtol=1e-13, atol=1e-13)
    if not values:
        assert asked == [
            7 if mask is MASK else 1,
            14,
            21,
            28,
            35,
            40,
        ]  # keys behind the last query of a block are left out
