"""Masks of attention are kept between runs of one batch: they are the same as made anew, and few."""

from dataclasses import replace

import torch

from parity_audit.formulas.decoder import Run
from parity_audit.formulas.place import Batch, Decoder

TOKENS = torch.arange(24).reshape(2, 12)
MASK = torch.ones_like(TOKENS)
MASK[1, :5] = 0
GIVEN = {
    f"blocks.0.{site}": torch.randn(2, 12, 2, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for seed, site in enumerate(("rot_q", "rot_k"))
}


def scores(batch: Batch, window: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    decoder = Decoder(
        dims={"n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "d_head": 4},
        values={"attention.window": [window], "attention.mask": ["hides the query's own key"]}, weights=lambda layer, role: None,
    )  # fmt: skip
    run = Run(decoder=decoder, batch=batch, given=GIVEN.get)
    return run.computed("blocks.0.attn_scores"), list(run.took.undefined.values())


def test_kept_masks_are_what_new_ones_are():
    batch = Batch(tokens=TOKENS, mask=MASK, positions=(MASK.cumsum(1) - 1).clamp_min(0))
    for window in (*range(1, 21), 3, 20):
        own, blind = scores(batch, window)
        new, blind_too = scores(replace(batch), window)

        assert torch.equal(own, new)
        assert blind
        assert torch.equal(blind[0], blind_too[0])
    assert len(batch.masks) == 16
