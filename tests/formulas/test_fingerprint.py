"""A tensor and its exact copy in a wider dtype have one fingerprint; a permuted one has another."""

import hashlib

import torch

from parity_audit.formulas.fingerprint import BLOCK_ROWS, FOLD, fingerprint


def test_the_dtype_that_holds_a_number_is_no_part_of_its_fingerprint():
    draw = torch.Generator().manual_seed(0)
    narrow = torch.randn(3 * BLOCK_ROWS + 1, FOLD // 2 + 3, generator=draw).to(torch.bfloat16)
    wide = narrow.float()

    assert fingerprint("w", narrow) == fingerprint("w", wide)
    assert fingerprint("w", narrow).sha256 == hashlib.sha256(wide.numpy()).hexdigest()
    assert abs(fingerprint("w", narrow).rms - float(wide.double().square().mean().sqrt())) < 1e-12
    assert fingerprint("w", narrow.flip(0)).sketch != fingerprint("w", narrow).sketch
