"""The data of a report's plots of a fit: captured scores beside the fitted formula, and the fitted rotary
frequencies."""

from __future__ import annotations

from typing import Any

import torch

from parity_audit.core.sites import local_name
from parity_audit.diagnose.evidence import POINTS, drawn_points
from parity_audit.diagnose.fit.residuals import Component, Residuals, Values, value_under, with_value
from parity_audit.formulas.frequencies import inverse_frequencies
from parity_audit.formulas.knobs import KNOBS, for_queries_or_keys

LAW_OFF: dict[str, Any] = {"attention.scale": 1.0, "attention.softcap": None, "attention.alibi": None}
"""Values under which the formula of the scores returns the product q.k itself."""
FREQUENCIES = ("rope.theta", "rope.scaling", "rope.partial")


def picture(residuals: Residuals, part: Component, knob: str, values: Values) -> dict[str, Any]:
    """Return the plot data of a knob's fit under these values; empty if there is no plot for this knob and site."""
    if knob in FREQUENCIES:
        return {"inv_freq": _frequencies(residuals, part, values)}
    if KNOBS[knob].component == "scores" and local_name(part.site) == "attn_scores":
        return {POINTS: _score_points(residuals, part, values)}
    return {}


def _frequencies(residuals: Residuals, part: Component, values: Values) -> list[float]:
    """Return the frequency of each pair of components, in radians per position; empty where nothing is rotated."""
    own = local_name(part.site).removeprefix("rot_")
    theta, scaling, partial = (
        for_queries_or_keys(value_under(residuals, values, knob, part.layer), own) for knob in FREQUENCIES
    )
    if theta is None:
        return []
    d_rot = int(partial or residuals.decoder.dims["d_head"])
    return inverse_frequencies(theta, scaling, d_rot, part.probe.shape[1], torch.float64).tolist()


def _score_points(residuals: Residuals, part: Component, values: Values) -> list[list[float]]:
    """Return points (q.k, captured score, fitted score) of the first head, sampled evenly over the order of q.k."""
    plain = values
    for knob, off in LAW_OFF.items():
        plain = with_value(residuals, plain, knob, off, part.layer)
    products, law = (residuals.made(part, own) for own in (plain, values))
    seen = residuals.captured(part.probe.name, part.site)
    if products is None or law is None or seen is None:
        return []
    shown = (products.isfinite() & seen.isfinite() & law.isfinite())[:, 0]
    return drawn_points(*(tensor[:, 0][shown] for tensor in (products, seen, law)))
