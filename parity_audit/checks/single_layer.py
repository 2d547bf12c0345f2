"""Measure the effect of an error of one constant in a single layer, for every layer, in a few runs.

All layers are moved at once, and every block is given its right input:

    blocks[l](right input, constant moved)  =  what an error in layer l alone does to the sites of block l

This gives for every layer an upper bound of its detection limit: later sites can only lower it. So the error of the layer
that seems least sensitive is followed through the rest of the model, with the constant right in all later layers. If that
layer is still the least sensitive, the search ends; otherwise the next one is followed. After `MORE_RUNS` layers the others
keep the bound from their own block: the reported limit is then an upper bound, and an error above it is still detected.

The computation after the last block (the final norm, the logits) is given its right input too, so it shows no layer's error.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace

from parity_audit.capture.store import Capture
from parity_audit.checks.responses import (
    FIRST_AMOUNTS,
    LARGEST_AMOUNT,
    MORE_RUNS,
    MeasurementSetup,
    PerturbableConstant,
    Response,
    changes,
    set_to,
    smallest,
    taken,
)
from parity_audit.core.limits import OUTER
from parity_audit.core.sites import ENTERS_BLOCK, LEAVES_BLOCK, layer_of, site_order
from parity_audit.diagnose.fit.search import SAME_WITHIN

ByLayer = Mapping[int, Response]


def by_layer(bench: MeasurementSetup, moved: PerturbableConstant, n_layers: int) -> dict[int, Response]:
    """Return, by layer, the response to an error in that layer alone; empty if no block shows the constant.

    A layer that does not respond at any amount that was tried has a response without sites.
    """
    layers = range(n_layers) if moved.layers is None else moved.layers
    found: dict[int, Response] = {}
    for amount in FIRST_AMOUNTS:
        local = _local(bench, moved, amount * moved.size, n_layers)
        if local is None:
            return {}
        responses, capture = local
        new = {layer: response for layer, response in responses.items() if layer in layers and layer not in found}
        found |= new | _followed(bench, new, capture)
        shutil.rmtree(capture.folder, ignore_errors=True)
        if set(layers) <= found.keys():
            break
    if not found:
        return {}
    silent = Response(moved=moved, amount=FIRST_AMOUNTS[-1] * moved.size, by_site={})
    return {**dict.fromkeys(layers, silent), **found, **_corrected(bench, found, n_layers)}


def _local(
    bench: MeasurementSetup, moved: PerturbableConstant, amount: float, n_layers: int
) -> tuple[dict[int, Response], Capture] | None:
    """Run every block on its right input with the constant moved in all of them; return the responses and the capture.

    None if the judge has no live setting for the constant.
    """
    amount = moved.amount(amount)
    if not set_to(bench, moved, amount):
        return None
    inputs = {f"blocks.{layer}.{name}" for layer in range(n_layers) for name in ENTERS_BLOCK}
    inputs |= {f"blocks.{n_layers - 1}.{name}" for name in LEAVES_BLOCK}
    capture = taken(bench, "single", forced_by=bench.still, at=inputs)
    found: dict[int, dict[str, float]] = {}
    for site, change in changes(capture, bench).items():
        layer = layer_of(site)
        if layer is not None and not site.endswith(ENTERS_BLOCK):  # made by the block before
            found.setdefault(layer, {})[site] = change
    return {layer: Response(moved=moved, amount=amount, by_site=sites) for layer, sites in found.items()}, capture


def _followed(bench: MeasurementSetup, local: ByLayer, capture: Capture) -> dict[int, Response]:
    """Return the responses of one local run; those of the least sensitive layers also include the later sites."""
    known, followed = dict(local), set[int]()
    while known and len(followed) < MORE_RUNS:
        least = _least_sensitive(bench, known)
        if least in followed:
            break
        known[least] = _further_on(bench, known[least], capture, least)
        followed.add(least)
    return known


def _least_sensitive(bench: MeasurementSetup, responses: ByLayer) -> int:
    return max(responses, key=lambda layer: smallest(responses[layer], bench.floors)[0])


def _further_on(bench: MeasurementSetup, own: Response, local: Capture, layer: int) -> Response:
    """Return a layer's response with the later sites added: the rest of the model runs unchanged on that layer's wrong output."""
    bench.session.apply(())
    capture = taken(
        bench, "followed", only=OUTER, forced_by=local, at={f"blocks.{layer}.{name}" for name in LEAVES_BLOCK}
    )
    order = site_order(f"blocks.{layer}.resid_post")
    later = {site: change for site, change in changes(capture, bench).items() if site_order(site) > order}
    shutil.rmtree(capture.folder, ignore_errors=True)
    return replace(own, by_site={**later, **own.by_site})


def _corrected(bench: MeasurementSetup, found: ByLayer, n_layers: int) -> dict[int, Response]:
    """Measure the least sensitive layer again at its predicted detection limit, if that is larger than the amount used.

    This is needed because not every constant acts linearly.
    """
    least = _least_sensitive(bench, found)
    moved, amount = found[least].moved, found[least].amount
    target = moved.amount(min(smallest(found[least], bench.floors)[0], LARGEST_AMOUNT * moved.size))
    if target <= SAME_WITHIN * amount:
        return {}
    local = _local(bench, moved, target, n_layers)
    if local is None:
        return {}
    responses, capture = local
    again = {least: _further_on(bench, responses[least], capture, least)} if least in responses else {}
    shutil.rmtree(capture.folder, ignore_errors=True)
    return again
