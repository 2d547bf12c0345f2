"""What a spec says of itself as a backend: every site is its own module, every tensor has its own name, every knob is live."""

from __future__ import annotations

from parity_audit.core.sites import AFTER_BLOCKS, BEFORE_BLOCKS, BLOCK_ORDER, RETURNED
from parity_audit.formulas.knobs import ROWS
from parity_audit.specs.schema import BackendKnob, BackendSection, EditEntry, SiteEntry, SpecFile

SPEC = "spec"
DEFINITION = "hf"
"""The backend whose list of sites is the architecture's; a spec without it has every site that its formulas make."""


def own_section(content: SpecFile) -> BackendSection:
    """The section of the backend `spec`, which no file has to write."""
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
