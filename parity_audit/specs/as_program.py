"""The spec section of the backend `spec`, which runs the formulas of the spec itself.

In this backend the module of a site has the site's name, every tensor has its name in the checkpoint, and every knob
can be set.
"""

from __future__ import annotations

from parity_audit.core.sites import AFTER_BLOCKS, BEFORE_BLOCKS, BLOCK_ORDER, RETURNED
from parity_audit.formulas.knobs import ROWS
from parity_audit.specs.schema import BackendKnob, BackendSection, EditEntry, SiteEntry, SpecFile

SPEC = "spec"
DEFINITION = "hf"
"""The backend whose section lists the sites of the architecture. A spec without this section has every
site of `core.sites` except `returned`."""


def own_section(content: SpecFile) -> BackendSection:
    """Return the section of the backend `spec`, which is derived, so that no spec file has to write it."""
    listed = content.backends.get(DEFINITION)
    sites = {site: entry.when for site, entry in listed.sites.items() if entry is not None} if listed else {}
    if not sites:
        every = (*BEFORE_BLOCKS, *(f"blocks.{{l}}.{name}" for name in BLOCK_ORDER), *AFTER_BLOCKS)
        sites = dict.fromkeys((site for site in every if site != RETURNED), "true")
    edit = {row.name: EditEntry(op="knob", path=row.name, value="=per_layer()") for row in ROWS}
    return BackendSection(
        sites={site: SiteEntry(module=site, when=when) for site, when in sites.items()}, other_weights="{name}",
        knobs={name: BackendKnob(edits=[entry]) for name, entry in edit.items()},
    )  # fmt: skip
