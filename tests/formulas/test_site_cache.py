"""What formulas made is kept while what it depends on stays the same, and no more than there is room for."""

import pytest
import torch

from parity_audit.formulas import site_cache
from parity_audit.formulas.decoder import Run
from parity_audit.formulas.place import Batch, Decoder, Dependencies
from parity_audit.formulas.site_cache import ComputedSite, SiteCache

GIGABYTE = 2**27
"""In numbers of float64."""
D = 8
WEIGHTS = {
    role: torch.randn(D, D, generator=torch.Generator().manual_seed(seed))
    for seed, role in enumerate(("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down"))
} | {role: torch.rand(D) for role in ("norm.ln1", "norm.ln2", "norm.q", "norm.k")}
STREAM = torch.randn(1, 6, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
TOKENS = torch.arange(6)[None]
VALUES = {"norm.eps": [1e-5], "attention.scale": [2.0], "mlp.activation": ["relu"], "rope.theta": [None]}


def run(store: SiteCache | None, values: dict) -> Run:
    decoder = Decoder(
        dims={"n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "d_head": 4, "d_model": D}, values=values,
        weights=lambda layer, role: WEIGHTS.get(role),
    )  # fmt: skip
    batch = Batch(tokens=TOKENS, mask=torch.ones_like(TOKENS), positions=TOKENS)
    return Run(decoder=decoder, batch=batch, given={"blocks.0.resid_pre": STREAM}.get, kept=store)


@pytest.mark.parametrize(
    "changed",
    [
        {"attention.scale": [3.0]}, {"norm.eps": [0.5]}, {"qk_norm.eps": [0.5]}, {"mlp.activation": ["silu"]},
        {"residual.scale": [0.5]}, {"residual.repeated": ["the first"]}, {"attention.window": [2]}, {},
    ],
    ids=lambda changed: next(iter(changed), "nothing"),
)  # fmt: skip
def test_what_is_kept_is_what_is_made_anew(changed):
    store = SiteCache()
    run(store, VALUES).computed("blocks.0.resid_post")
    for values in ({**VALUES, **changed}, VALUES):
        own, new = run(store, values), run(None, values)

        assert torch.equal(own.computed("blocks.0.resid_post"), new.computed("blocks.0.resid_post"))
        assert own.took.asked == new.took.asked
        assert own.read["blocks.0.resid_post"] == new.read["blocks.0.resid_post"]


def test_only_what_depends_on_a_value_is_made_again():
    store = SiteCache()
    run(store, VALUES).computed("blocks.0.resid_post")
    before = {site: entry.made.tensor for (_, site), entry in store.entries.items()}
    run(store, {**VALUES, "attention.scale": [3.0]}).computed("blocks.0.resid_post")
    same = {site for (_, site), entry in store.entries.items() if entry.made.tensor is before[site]}

    assert {"blocks.0.q", "blocks.0.k_norm.out", "blocks.0.v"} <= same
    assert same.isdisjoint(
        {"blocks.0.z", "blocks.0.attn_proj", "blocks.0.resid_mid", "blocks.0.mlp.post", "blocks.0.resid_post"}
    )


def test_a_gigabyte_is_kept_and_what_was_not_taken_for_longest_goes_first():
    def made(gigabytes: float) -> ComputedSite:
        return ComputedSite(tensor=torch.empty(int(gigabytes * GIGABYTE), dtype=torch.float64), took=Dependencies())

    store = SiteCache()
    for name, size in {"old": 0.4, "newer": 0.4, "newest": 0.4, "none": 1.2}.items():
        store.keep((name, ""), made(size), VALUES)

    assert [name for name, _ in store.entries] == ["newer", "newest"]
    assert 0 < store.bytes <= site_cache.BYTES_KEPT
    assert store.found(("newer", ""), VALUES) is not None
    store.keep(("one more", ""), made(0.4), VALUES)
    assert [name for name, _ in store.entries] == ["newer", "one more"]
    store.keep(("newer", ""), made(0.01), VALUES)
    assert store.bytes == sum(entry.bytes for entry in store.entries.values())
