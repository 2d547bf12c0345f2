"""Attention: scale, soft-cap, ALiBi, sinks, window, mask and softmax, together: each hides the others when fitted alone.

Scores visible: `visible` for scale, soft-cap and ALiBi, `softmax` for what becomes of the scores.
Hidden: `hidden`, by synthesis on z.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, gap
from parity_audit.diagnose.identify.attention.bias import bias_of, changed_scores, told
from parity_audit.diagnose.identify.attention.head_map import head_maps
from parity_audit.diagnose.identify.attention.hidden import Hidden, bend_from_z
from parity_audit.diagnose.identify.attention.knobs import ALIBI, law_knobs
from parity_audit.diagnose.identify.attention.mask import mask_from_scores
from parity_audit.diagnose.identify.attention.output import fit_output
from parity_audit.diagnose.identify.attention.rows import Row, are_the_pattern, attention_rows
from parity_audit.diagnose.identify.attention.softmax import fit_softmax
from parity_audit.diagnose.identify.attention.visible import Bend, bend_from_scores
from parity_audit.diagnose.identify.attention.window import (
    Reach,
    late_queries,
    reach_from_scores,
    reach_from_z,
    window_fit,
)
from parity_audit.diagnose.thresholds import EXPLAINED

Maps = tuple[list[int], list[int]]  # kv head of each head, for k and for v
SCALE, CAP, WINDOW, MASK = "attention.scale", "attention.softcap", "attention.window", "attention.mask"


def fit(evidence: Evidence) -> list[Outcome]:
    """The attention knobs of one layer."""
    if evidence.layer is None:
        return []
    if _scores_are_the_pattern(evidence):
        evidence = dataclasses.replace(evidence, tensor=changed_scores(evidence, lambda _: None))
    rows = list(attention_rows(evidence, evidence.short_probes()))
    if not rows:
        return [gap(evidence, knob, "rotated q and k are not visible") for knob in (SCALE, CAP, WINDOW)]
    maps = head_maps(evidence)
    rows, heads = [_mapped(row, maps) for row in rows], maps[1] if maps[0] == maps[1] else list(range(len(maps[0])))
    bend, bias = bend_from_scores(evidence, rows, heads), None
    if bend is not None:
        reaches = [reach for row in rows if (reach := reach_from_scores(evidence, row)) is not None]
        outcomes = [mask_from_scores(evidence), *fit_softmax(evidence, rows), fit_output(evidence, rows, heads)]
        bias, bend = bias_of(evidence, rows, heads, bend)
        outcomes.append(told(evidence, bias, bend))
    else:
        hidden = bend_from_z(evidence, rows, heads)
        bend, reaches, outcomes = hidden.bend, hidden.reaches, [_mask(evidence, hidden)]
    if bend is None or bend.residual > EXPLAINED:
        why = "no scale, soft-cap and window explain " + ("the scores" if bend and bend.site == "attn_scores" else "z")
        return [*outcomes, *(gap(evidence, knob, why) for knob in (SCALE, CAP)), window_fit(evidence, reaches)]
    reaches = reaches + _long_reaches(evidence, maps, heads, bend)
    law = law_knobs(evidence, bend)
    if bias is not None and not bias.sparse:  # a bias at every distance cannot be told from ALiBi
        law = [outcome for outcome in law if not isinstance(outcome, KnobFit) or outcome.knob != ALIBI]
    return [*outcomes, *law, window_fit(evidence, reaches)]


def _scores_are_the_pattern(evidence: Evidence) -> bool:
    """Then no law and no mask is to be read there."""
    both = (
        [evidence.tensor(probe.name, site) for site in ("attn_scores", "pattern")] for probe in evidence.short_probes()
    )
    return are_the_pattern((scores, pattern) for scores, pattern in both if scores is not None and pattern is not None)


def _mapped(row: Row, maps: Maps) -> Row:
    """The row as it is; with k and v of each head where heads read keys and values from different kv heads."""
    if maps[0] == maps[1]:
        return row
    return dataclasses.replace(row, k=row.k[:, maps[0]], v=None if row.v is None else row.v[:, maps[1]])


def _mask(evidence: Evidence, hidden: Hidden) -> Outcome:
    if hidden.mask is None or hidden.bend is None:
        return gap(evidence, MASK, hidden.why)
    return KnobFit(knob=MASK, layer=evidence.layer, value=hidden.mask, stderr=None, residual=hidden.bend.residual,
                   n=hidden.bend.n, site="z")  # fmt: skip


def _long_reaches(evidence: Evidence, maps: Maps, heads: Sequence[int], bend: Bend) -> list[Reach]:
    """Reaches on probes that are longer than any probe whose scores fit in memory."""
    long = [probe for probe in evidence.probes if probe.sites != "all"]
    rows = [_mapped(row, maps) for probe in long for row in attention_rows(evidence, [probe])]
    reaches = (reach_from_z(row, heads, bend.law, late_queries(row.length)) for row in rows)
    return [reach for reach in reaches if reach is not None]
