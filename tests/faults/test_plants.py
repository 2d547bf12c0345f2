"""Every planted fault is one: it moves the logits, and the model without plants is the checkpoint's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from parity_audit.selftest.corpus import Fault, load_corpus, resolved
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model

sys.path.insert(0, str(Path(__file__).parent))
import plants

CORPUS = load_corpus()
BY_MODEL = {
    model: [fault for fault in faults if not fault.long and not fault.harmless]
    for model, faults in CORPUS.by_model.items()
}
ROUNDING = 1e-4


def logits(model: torch.nn.Module, vocab: int) -> torch.Tensor:
    """Of two rows, the second padded on the left."""
    tokens = torch.randint(8, vocab, (2, 40), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
    return out[mask.bool()]


def load(fault: Fault | None, name: str, cache: Path) -> torch.Tensor:
    resolved_model = resolve_model(name)
    made = miniature.make(resolved_model, root=cache / "synthetic")
    operations = [] if fault is None else resolved(fault, resolved_model.spec)
    model = plants.load(operations, made.path, "float32", "cpu")
    return logits(model, min(500, model.config.vocab_size))


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; logits of another width are infinitely far."""
    return float((a - b).abs().max()) if a.shape == b.shape else float("inf")


@pytest.mark.parametrize("name", sorted(BY_MODEL))
def test_every_fault_moves_the_logits(name, cache):
    clean = load(None, name, cache)
    moved = {fault.id: apart(load(fault, name, cache), clean) for fault in BY_MODEL[name]}

    assert [fault for fault, distance in moved.items() if not distance > ROUNDING] == []


def test_the_corpus_is_as_large_as_we_say():
    named = {knob for faults in CORPUS.by_model.values() for fault in faults for knob in fault.knobs}

    assert CORPUS.size >= 150
    assert len(named) >= 20
    sources = {word for faults in CORPUS.by_model.values() for fault in faults for word in fault.source.split()}
    assert len({word for word in sources if word.count("-") > 1}) >= 65  # real errors, by their short names
    assert os.path.isfile(Path(__file__).parent / "plants.py")
