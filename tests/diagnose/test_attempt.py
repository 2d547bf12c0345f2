"""A fit that breaks off is a gap with its name, and the other fits go on; errors of the audit itself are raised."""

import dataclasses

import pytest
from tiny_port import Port, evidence, spec_of

from parity_audit.core.errors import CaptureBroken
from parity_audit.core.types import NotTested
from parity_audit.diagnose.attempt import attempt
from parity_audit.diagnose.fitting import causes_at

PORT = Port()


def with_a_broken_norm(port, side="candidate"):
    """Evidence whose normalised stream has lost an axis, as a port with another layout may show them."""
    layers = evidence(port, side, knobs=spec_of(PORT))

    def broken(own):
        def tensor(probe, site):
            found = own.tensor(probe, site)
            return found[0] if site == "ln2.out" and found is not None else found

        return dataclasses.replace(own, tensor=tensor)

    return {layer: broken(own) for layer, own in layers.items()}


def test_a_broken_fit_is_a_gap_and_the_others_find_what_is_wrong():
    sides = with_a_broken_norm(PORT.but(act="gelu")), evidence(PORT, "reference")
    wrong = ["blocks.0.ln2.out", "blocks.0.mlp.pre", "blocks.0.mlp.post", "blocks.1.mlp.post"]
    findings, gaps = causes_at(*sides, wrong)
    broken = {gap.what for gap in gaps if "broke off with" in gap.why}

    assert "mlp.activation" in {finding.knob for finding in findings}
    assert {"causes by formula at blocks.0.ln2.out", "structure of the projections of the candidate, layer 0"} <= broken
    assert not any("reference" in what for what in broken)


def test_the_gap_names_the_error_and_its_line():
    found = attempt("fit `x`", lambda: [][3])

    assert isinstance(found, NotTested)
    assert found.what == "fit `x`"
    assert found.why.startswith("broke off with IndexError at test_attempt.py:")


@pytest.mark.parametrize("error", [CaptureBroken("gone"), MemoryError(), KeyboardInterrupt()])
def test_errors_of_the_audit_are_raised(error):
    def step():
        raise error

    with pytest.raises(type(error)):
        attempt("fit `x`", step)
