"""What is read off a component of the judge that no single knob's formula reproduces: by the fits that an audit falls back to."""

from __future__ import annotations

from dataclasses import dataclass

from parity_audit.core.sites import local_name
from parity_audit.core.types import KnobValue, Probe
from parity_audit.diagnose.evidence import Evidence, KnobFit
from parity_audit.diagnose.findings import departure
from parity_audit.diagnose.fit.residuals import Component, Residuals, Values
from parity_audit.diagnose.fitting import FAMILIES, fit_side
from parity_audit.diagnose.localise import component_of

SIDE = "reference"


@dataclass(frozen=True, kw_only=True)
class _Said:
    """What the spec says of a knob in one layer."""

    value: KnobValue
    layers: tuple[int, ...] | None = None
    off: KnobValue = None


def read_off(residuals: Residuals, component: Component, values: Values) -> KnobFit | None:
    """The first constant of a component that is not the one of these values; None where nothing else is read.

    Args:
        residuals: the judge's captures.
        component: what the formula under these values does not reproduce.
        values: what the spec says, one value per layer.
    """
    evidence = _evidence(residuals, component, values)
    families = [fit for fit, components in FAMILIES.values() if component_of(component.site) in components]
    fits, _ = fit_side([evidence], families)
    # Both sides of the comparison are the judge here, so a fit departs from the spec on both or on none.
    return next((fit for fit in fits if departure([fit], [fit], evidence.knobs) == "both"), None)


def _evidence(residuals: Residuals, component: Component, values: Values) -> Evidence:
    """The judge's captures of one layer as the fits take them."""
    layer, decoder = component.layer, residuals.decoder
    prefix = "" if layer is None else component.site.removesuffix(local_name(component.site))
    probes: tuple[Probe, ...] = (component.probe,)
    return Evidence(
        side=SIDE,
        layer=layer,
        dims=decoder.dims,
        knobs={knob: _Said(value=each[layer or 0]) for knob, each in values.items()},
        probes=probes,
        tensor=lambda probe, site: residuals.captured(probe, prefix + site),
        weight=lambda role: decoder.weights(layer, role),
    )
