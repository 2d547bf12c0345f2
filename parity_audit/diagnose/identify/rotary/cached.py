"""Where decoded tokens stand: the prompt's own frequencies, and the position that fits each decoded token best.

A cache that miscounts turns decoded tokens by the angle of another position, at the frequencies of the prompt.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, gap
from parity_audit.diagnose.identify.rotary import family as rotary
from parity_audit.diagnose.identify.rotary.angles import measure
from parity_audit.diagnose.identify.rotary.positions import described, each_position
from parity_audit.diagnose.identify.rotary.turns import Turn, layout_of, q_over_k, turns_of


def fit(evidence: Evidence) -> list[Outcome]:
    """`rope.offset` of decoded tokens; every rope knob where they do not turn at the prompt's frequencies."""
    if evidence.layer is None:
        return []
    turns = turns_of(evidence, evidence.probes, q_scale=q_over_k(evidence))
    first = evidence.probes[0].decode_from or 0
    layout = (
        layout_of([_cut(turn, first) for turn in turns])
        if turns
        else "q and k are not visible before and after rotation"
    )
    if isinstance(layout, str):
        return [gap(evidence, rotary.OFFSET, layout)]
    prompt, whole = measure([_cut(turn, first) for turn in turns], layout), measure(turns, layout)
    found = [
        each_position(factor, prompt.inv_freq, turn.length) for factor, turn in zip(whole.factors, turns, strict=True)
    ]
    places = [place for place in found if place is not None]
    if not prompt.even or len(places) < len(turns):
        return rotary.fit(evidence)
    value, facts = described(turns, places)
    return [KnobFit(knob=rotary.OFFSET, layer=evidence.layer, value=value, stderr=None, residual=prompt.residual,
                    n=sum(map(len, places)), site="rot_q", evidence=facts)]  # fmt: skip


def _cut(turn: Turn, length: int) -> Turn:
    """The first tokens of a sequence."""
    keep = torch.arange(len(turn.position)) < length
    return replace(
        turn, position=turn.position[keep], index=turn.index[keep], before=turn.before[keep], after=turn.after[keep]
    )  # fmt: skip
