"""Every planted fault is one: it moves the logits, and the model without plants is the checkpoint's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    model: [fault for fault in faults if not fault.long and not fault.harmless and not fault.host]
    for model, faults in CORPUS.by_model.items()
}
ROUNDING = 2e-5  # twenty times what float32 leaves of these logits; a final norm.eps of 1e-4 moves them by 9e-5


def logits(model: torch.nn.Module, vocab: int) -> torch.Tensor:
    """Of two rows, the second padded on the left."""
    tokens = torch.randint(8, vocab, (2, 40), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
    return out[mask.bool()]


def decoded_logits(model: torch.nn.Module, vocab: int) -> torch.Tensor:
    """Of eight tokens after a prompt, one at a time."""
    tokens = torch.randint(8, vocab, (1, 40), generator=torch.Generator().manual_seed(3))
    seen, cache = [], None
    with torch.no_grad():
        for start, stop in ((0, 32), *((at, at + 1) for at in range(32, 40))):
            out = model(input_ids=tokens[:, start:stop], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            seen.append(out.logits)
    return torch.cat(seen[1:], 1)


def load(fault: Fault | None, name: str, cache: Path) -> tuple[torch.nn.Module, int]:
    """The model with the fault in it, and how many token ids it has."""
    resolved_model = resolve_model(name)
    made = miniature.make(resolved_model, root=cache / "synthetic")
    operations = [] if fault is None else resolved(fault)
    model = plants.load(operations, made.path, "float32", "cpu")
    return model, min(500, model.config.vocab_size)


@contextmanager
def own_functions(model_class: type) -> Iterator[None]:
    """Put back the functions of the model's module afterwards: a plant in attention or rotary replaces them for every
    model of this process, here as in a worker."""
    module = sys.modules[model_class.__module__]
    before = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(before)


def only_decoded(fault: Fault) -> bool:
    return all(plant.get("decoded") for plant in fault.plant)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; logits of another width are infinitely far."""
    return float((a - b).abs().max()) if a.shape == b.shape else float("inf")


@pytest.mark.parametrize("name", sorted(BY_MODEL))
def test_every_fault_moves_the_logits(name, cache):
    right, vocab = load(None, name, cache)
    clean = logits(right, vocab)
    still = []
    for fault in BY_MODEL[name]:
        with own_functions(type(right)):
            if not only_decoded(fault) and not apart(logits(*load(fault, name, cache)), clean) > ROUNDING:
                still.append(fault.id)

    assert still == []
    assert apart(logits(right, vocab), clean) == 0.0


@pytest.mark.parametrize("name", [name for name, faults in sorted(BY_MODEL.items()) if any(map(only_decoded, faults))])
def test_faults_of_decoding_move_decoded_tokens_alone(name, cache):
    right, vocab = load(None, name, cache)
    whole, steps = logits(right, vocab), decoded_logits(right, vocab)
    for fault in filter(only_decoded, BY_MODEL[name]):
        with own_functions(type(right)):
            assert apart(logits(*load(fault, name, cache)), whole) == 0.0, fault.id
            assert apart(decoded_logits(*load(fault, name, cache)), steps) > ROUNDING, fault.id


def test_the_corpus_is_as_large_as_we_say():
    named = {knob for faults in CORPUS.by_model.values() for fault in faults for knob in fault.knobs}

    assert CORPUS.size >= 150
    assert len(named) >= 20
    sources = {word for faults in CORPUS.by_model.values() for fault in faults for word in fault.source.split()}
    assert len({word for word in sources if word.count("-") > 1}) >= 70  # real errors, by their short names
    assert os.path.isfile(Path(__file__).parent / "plants.py")
