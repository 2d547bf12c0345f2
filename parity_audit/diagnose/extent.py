"""Find rules for the tokens at which a component is wrong, for example from a position on, or only in padded rows.

A token is wrong if the candidate's tensor differs there from what the judge computes from the same inputs by more than
`MANY_ROUNDINGS` roundings of the token's largest number. A rule such as "from position 20 on" is reported only if the
tokens that it classifies wrongly are at most 1 % of all tokens and at most 10 % of the wrong tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parity_audit.capture.probes import AGAIN
from parity_audit.capture.store import Capture
from parity_audit.compare.floor import dtype_eps
from parity_audit.compare.threads import one_thread
from parity_audit.core.report import Finding
from parity_audit.core.sites import ATTENTION_SITES
from parity_audit.core.types import NotTested, Probe
from parity_audit.diagnose.attempt import attempt
from parity_audit.diagnose.evidence import f64, real
from parity_audit.diagnose.thresholds import MANY_ROUNDINGS, MOST_UNEXPLAINED, NEARLY_ALL, SHOWN

CaptureAndReplay = tuple[Capture, Capture]
"""A capture, and the judge's replay on the inputs in it."""
DECODED = "in tokens decoded from the cache"
ONE_AT_A_TIME, SEVERAL_AT_A_TIME = f"{DECODED} one at a time", f"{DECODED} several at a time"
DTYPE = "float32"
"""The only dtype in which extents are searched: in coarser ones a single token shows little."""
OF_POSITIONS = (
    "attention.temperature_by_position", "attention.window", "attention.window_first", "attention.chunk", "delta.chunk",
)  # fmt: skip
"""Knobs whose value already states the positions at which they act; no rule about positions is reported for them."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Properties of every real token of every probe, one entry per token.

    `ident`: the token id. `rows`, `length`: the number of rows of its probe, and of real tokens of its row. `again`:
    whether its probe repeats an earlier one, after other texts. `position`, `column`: its position without and with
    padding counted. `row`: its row. `in_batch`: whether its probe has more than one row. `padded_left`, `padded_right`:
    how its row is padded. `decoded`: whether it was decoded from the KV cache. `of_several`: whether that was in a step
    of several tokens. `last`: whether it was the last token of its row when it was computed. `wrong`: whether it is
    wrong.
    """

    ident: Tensor
    rows: Tensor
    length: Tensor
    again: Tensor

    position: Tensor
    column: Tensor
    row: Tensor
    in_batch: Tensor
    padded_left: Tensor
    padded_right: Tensor
    decoded: Tensor
    of_several: Tensor
    last: Tensor
    wrong: Tensor

    def is_where(self, rule: Tensor) -> bool:
        """Whether `rule` (a mask over tokens) separates wrong tokens from right ones, up to a few misclassified tokens.

        These may be at most a share 1 - `NEARLY_ALL` of all tokens and `MOST_UNEXPLAINED` of the wrong ones. False if
        the rule holds for all tokens or for none.
        """
        strays = int((rule != self.wrong).sum())
        few = strays <= min((1 - NEARLY_ALL) * len(rule), MOST_UNEXPLAINED * int(self.wrong.sum()))
        return bool(rule.any()) and not bool(rule.all()) and few


@one_thread()
def with_extents(
    findings: Sequence[Finding], pairs: Sequence[CaptureAndReplay], dtype: str
) -> tuple[list[Finding], list[NotTested]]:
    """Add `extent` to the evidence of findings that do not hold for all tokens; also return the gaps."""
    if dtype != DTYPE:
        return list(findings), []
    found = [attempt(f"where {item.knob} holds", partial(_with_extent, item, pairs)) for item in findings]
    told = [old if isinstance(new, NotTested) else new for old, new in zip(findings, found, strict=True)]
    return told, [gap for gap in found if isinstance(gap, NotTested)]


def _with_extent(finding: Finding, pairs: Sequence[CaptureAndReplay]) -> Finding:
    # A finding of decoded tokens already has this extent, and may get one that covers some of them only.
    known = finding.evidence.get("extent", "")
    tokens = _tokens(pairs, finding.site)
    said = None if tokens is None else extent(tokens, by_position=finding.knob not in OF_POSITIONS)
    return finding if said is None or not said.startswith(known) else only_where(finding, said)


def only_where(finding: Finding, said: str) -> Finding:
    """The finding, with its extent and its message limited to the tokens that `said` describes."""
    known = f"; only {finding.evidence.get('extent')}"
    message = f"{finding.message.removesuffix(known)}; only {said}"
    return dataclasses.replace(finding, evidence={**finding.evidence, "extent": said}, message=message)


def is_of_decoding(finding: Finding) -> bool:
    """Whether a finding is limited to tokens that were decoded from the KV cache."""
    return str(finding.evidence.get("extent", "")).startswith(DECODED)


def extent(tokens: Tokens, *, by_position: bool) -> str | None:
    """The first rule that separates wrong tokens from right ones, in words; None if there is no such rule.

    Args:
        tokens: the tokens of a site.
        by_position: whether rules about positions are allowed.
    """
    if not bool(tokens.wrong.any()) or bool(tokens.wrong.all()):
        return None
    for words, rule in _rules(tokens, by_position):
        if tokens.is_where(rule):
            return words
    return None


def _rules(tokens: Tokens, by_position: bool) -> Iterator[tuple[str, Tensor]]:
    yield DECODED, tokens.decoded
    yield ONE_AT_A_TIME, tokens.decoded & ~tokens.of_several
    yield SEVERAL_AT_A_TIME, tokens.decoded & tokens.of_several
    # The last token of a step may attend to all keys, so that a wrong mask does not show at it.
    yield SEVERAL_AT_A_TIME, tokens.decoded & tokens.of_several & ~tokens.last
    yield f"{DECODED}, in rows that are padded on the left", tokens.decoded & tokens.padded_left
    yield f"{DECODED}, in batches of more than one row", tokens.decoded & tokens.in_batch
    yield "at the last token of a row", tokens.last
    yield "in rows that are padded on the left", tokens.padded_left
    yield "in rows that are padded on the right", tokens.padded_right
    yield "in batches of more than one row", tokens.in_batch
    yield "when the model was used before on other texts", tokens.again
    least, longest = int(tokens.rows[tokens.wrong].min()), int(tokens.length[tokens.wrong].max())
    yield f"in batches of {least} rows or more", tokens.rows >= least
    yield f"in texts of {longest} token{'s or fewer' if longest > 1 else ''}", tokens.length <= longest
    rows = sorted(set(tokens.row[tokens.wrong].tolist()))
    named = torch.isin(tokens.row, torch.tensor(rows))
    yield f"in row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows))} of a batch", named & tokens.in_batch
    places = ((tokens.position, ""), (tokens.column, ", padding counted")) if by_position else ()
    for place, counted in places:
        first, last = _span(place, tokens)
        if _begins_late(first):
            yield f"at positions from {first} on{counted}", place >= first
        yield f"at positions up to {last}{counted}", place <= last
    ids = sorted(set(tokens.ident[tokens.wrong].tolist()))
    if len(ids) <= SHOWN:
        named = torch.isin(tokens.ident, torch.tensor(ids))
        yield f"at the token id{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}", named
    for place, counted in places:
        first, last = _span(place, tokens)
        if _begins_late(first):
            yield f"at positions {first} to {last}{counted}", (place >= first) & (place <= last)


def _begins_late(first: int) -> bool:
    """Whether an error begins after position 1.

    The first token sees only itself and is not rotated, so an error at all later tokens counts as an error everywhere.
    """
    return first > 1


def _span(place: Tensor, tokens: Tokens) -> tuple[int, int]:
    """The smallest and the largest value of `place` among wrong tokens."""
    return int(place[tokens.wrong].min()), int(place[tokens.wrong].max())


def _tokens(pairs: Sequence[CaptureAndReplay], site: str) -> Tokens | None:
    parts = [
        _of_probe(own.tensor(probe.name, site), true.tensor(probe.name, site), probe, site)
        for own, true in pairs
        for probe in _as_run(own, true)
        if site in own.sites(probe.name) & true.sites(probe.name)
    ]
    if not parts:
        return None
    names = [field.name for field in dataclasses.fields(Tokens)]
    return Tokens(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def _as_run(own: Capture, true: Capture) -> list[Probe]:
    """The replayed probes, with the positions that the candidate ran."""
    replayed = {probe.name for probe in true.probes}
    return [probe for probe in own.probes if probe.name in replayed]


def _of_probe(own: Tensor, true: Tensor, probe: Probe, site: str) -> Tokens:
    keep = real(probe)
    true = true[tuple(slice(0, size) for size in own.shape)]
    apart, size = (_by_token(value, site) for value in (_difference(own, true), f64(true).nan_to_num(0.0, 0.0, 0.0)))
    wrong = apart > MANY_ROUNDINGS * dtype_eps(DTYPE) * size
    row, column = torch.arange(keep.shape[0])[:, None].expand_as(keep), torch.arange(keep.shape[1]).expand_as(keep)
    first = keep.shape[1] if probe.decode_from is None else probe.decode_from
    decoded = column >= first
    of_several = decoded & (column < first + probe.at_once) & (probe.at_once > 1)
    # Cached decoding computes the last token of the prompt, and of every later step, as the last token of its row.
    last = (column == first - 1) | (column >= first + probe.at_once - 1) | (keep.flip(1).cumsum(1).flip(1) == 1)
    left, right = ~keep[:, :1].expand_as(keep), ~keep[:, -1:].expand_as(keep)
    of_batch = torch.full_like(keep, keep.shape[0] > 1)
    return Tokens(
        ident=torch.tensor(probe.token_ids)[keep], rows=torch.full_like(row, keep.shape[0])[keep],
        length=keep.sum(1, keepdim=True).expand_as(keep)[keep], again=torch.full_like(keep, probe.name == AGAIN)[keep],
        position=(keep.cumsum(1) - 1)[keep], column=column[keep], row=row[keep], wrong=wrong[keep], padded_left=left[keep],
        padded_right=right[keep], decoded=decoded[keep], of_several=of_several[keep], last=last[keep], in_batch=of_batch[keep],
    )  # fmt: skip


def _difference(own: Tensor, true: Tensor) -> Tensor:
    """The difference own - true, entry by entry: 0 where both sides mask an entry, and +-1e300 where only one of them
    does."""
    apart = f64(own) - f64(true)
    return torch.where(own.isinf() & true.isinf(), 0.0, apart).nan_to_num(0.0, 1e300, -1e300)


def _by_token(value: Tensor, site: str) -> Tensor:
    """The largest absolute value over all axes but batch and position (the query's position for attention matrices)."""
    if site.endswith(ATTENTION_SITES):
        return value.abs().amax(dim=(1, 3))
    return value.flatten(2).abs().amax(-1)
