"""Recognise a run that computed in a narrower dtype than was asked for, and report it as one cause.

In a model that was loaded in bfloat16, bfloat16 represents every number of the residual stream exactly; under autocast
it represents every number that the projections return. The components of such a run are then compared with the
tolerance of that dtype, as if the audit had asked for it, so that only a larger error counts as another cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parity_audit.compare.source import TensorSource
from parity_audit.core.report import Finding
from parity_audit.core.sites import layer_of, local_name
from parity_audit.core.types import NotTested
from parity_audit.diagnose import numerics
from parity_audit.diagnose.confidence import BY_COMPARISON
from parity_audit.formulas.choices import IN_ITS_TABLE
from parity_audit.formulas.rounding import NARROW, representable

DTYPE = "numerics.dtype"
ROTATION = "rope.dtype"
SETTINGS = (numerics.KNOB, DTYPE)
"""Knobs of findings that concern a whole run and no constant, so a reference cannot be given their value."""
STREAM = ("resid_post",)
PRODUCTS = ("q", "k", "v", "attn_proj", "mlp.pre", "mlp.pre_linear", "mlp_proj")
FEWEST_PROJECTIONS = 3
"""Number of projections that must be visible: one or two may be rounded because of a fault of their own."""


@dataclass(frozen=True, kw_only=True)
class Narrow:
    """A narrow dtype, and whether the whole residual stream is in it (`throughout`) or only the outputs of matrix
    products."""

    dtype: str
    throughout: bool


def narrow_dtype(candidate: TensorSource, reference: TensorSource, dtype: str) -> Narrow | None:
    """The narrow dtype in which the candidate computes and the reference does not; None if there is none.

    A dtype is recognised if it represents exactly the candidate's residual stream after every block, or the outputs of
    every projection (as under autocast), and not the reference's. None also if it is the `dtype` that was asked for.
    """
    probe, (_, tokens) = candidate.probes[0].name, candidate.probes[0].shape
    shared = sorted(site for site in candidate.sites(probe) & reference.sites(probe) if layer_of(site) is not None)

    def held(side: TensorSource, sites: Sequence[str], name: str) -> bool:
        tensors = (side.rows(probe, site, 0, tokens) for site in sites)
        return all(representable(x, NARROW[name]) and bool(x.any()) for x in tensors)

    for throughout, names in ((True, STREAM), (False, PRODUCTS)):
        sites = [site for site in shared if local_name(site) in names]
        if len({local_name(site) for site in sites}) < min(FEWEST_PROJECTIONS, len(names)):
            continue
        if dtype in NARROW and held(candidate, sites, dtype):
            return None  # bfloat16 numbers that are not tiny are float16 numbers as well
        for name in NARROW:
            if held(candidate, sites, name) and not held(reference, sites, name):
                return None if name == dtype else Narrow(dtype=name, throughout=throughout)
    return None


def follows_from(narrow: Narrow | None, finding: Finding) -> bool:
    """Whether a finding only says that one component rounds to the dtype in which the whole model computes.

    The angles of a rotation are not computed from activations, so they may be right even in a narrow-dtype run; a
    finding about their dtype does not follow unless it concerns the rounding of the table.
    """
    if narrow is None:
        return False
    value, rounds = str(finding.candidate_value), finding.knob.endswith(("dtype", ".rounded"))
    if finding.knob == ROTATION and not value.endswith(IN_ITS_TABLE):
        return False
    return (rounds and value.startswith(narrow.dtype)) or value.endswith(f"rounded to {narrow.dtype}")


def dtype_finding(candidate: TensorSource, reference: TensorSource, dtype: str) -> Finding | None:
    """The finding that a whole model, or its matrix products, computes in a narrow dtype where another was asked for;
    else None."""
    narrow = narrow_dtype(candidate, reference, dtype)
    if narrow is None:
        return None
    value = narrow.dtype if narrow.throughout else f"{narrow.dtype} in products"
    what = "of its residual stream" if narrow.throughout else "that its projections return, as under autocast,"
    return Finding(
        knob=DTYPE, kind="settings", layers=None, site="blocks.0.resid_post", reference_value=dtype, candidate_value=value,
        spec_value=dtype, confidence=BY_COMPARISON, departs_from_spec="candidate",
        evidence={"dtype": narrow.dtype, "throughout": narrow.throughout},
        message=f"the candidate computes in {value} and not in {dtype}: every number {what} is one of {narrow.dtype}'s",
    )  # fmt: skip


def hidden_by_dtype(narrow: str) -> NotTested:
    """The gap that a narrow dtype leaves: causes that are smaller than its rounding cannot be seen."""
    why = f"the candidate computes in {narrow}, whose rounding hides them; run it in the dtype that was asked for to see them"
    return NotTested(what=f"other causes below {narrow}'s rounding", why=why)
