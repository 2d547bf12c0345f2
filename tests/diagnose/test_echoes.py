"""What follows from a stream that the MLP does not read is no finding of its own."""

from __future__ import annotations

import pytest

from parity_audit.core.report import Finding
from parity_audit.diagnose.fitting import without_echoes
from parity_audit.diagnose.structure.sample import NOT_STORED


def said(knob: str, site: str, layers: tuple[int, ...] | None, value: object = 1.0) -> Finding:
    return Finding(
        knob=knob, kind="variant", layers=layers, site=site, reference_value=None, candidate_value=value, confidence=0.9
    )


@pytest.mark.parametrize("layers", [None, (1, 2)])
def test_the_norm_and_the_weights_behind_another_stream_say_nothing(layers):
    cause = said("residual.parallel", "blocks.1.ln2.out", layers, "sequential")
    norm, weights = (
        said("norm.eps", "blocks.1.ln2.out", (1, 2)),
        said("weights.mlp.gate", "blocks.1.mlp.pre", (1, 2), NOT_STORED),
    )

    assert without_echoes([cause, norm, weights]) == [cause]
    assert without_echoes([norm, weights]) == [norm, weights]


def test_other_norms_and_other_layers_are_kept():
    cause = said("residual.parallel", "blocks.1.ln2.out", (1,), "sequential")
    first, later = said("norm.eps", "blocks.1.ln1.out", (1,)), said("norm.eps", "blocks.3.ln2.out", (1, 3))

    assert without_echoes([cause, first, later]) == [cause, first, later]
