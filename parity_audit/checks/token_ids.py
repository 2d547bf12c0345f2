"""How two tokenisations of one text differ, in the words of what usually goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

SAME_MESSAGE = 2
"""Token ids in a row that two templates must have in common to be about the same message."""


def how_ids_differ(
    reference: Sequence[int], candidate: Sequence[int], bos: object = None, *, chat: bool = False
) -> str:
    """Doubled or missing BOS, ids shifted from one on (added tokens), another chat template, or the first difference.

    `chat`: both sides put chat messages through their template.
    """
    ours, theirs = list(reference), list(candidate)
    if ours and theirs == ours[:1] + ours:
        return f"{_name(ours[0], bos)} stands twice at the start"
    if ours and theirs == ours[1:]:
        return f"{_name(ours[0], bos)} is missing at the start"
    if theirs and ours == theirs[1:]:
        return f"{_name(theirs[0], bos)} is put in front"
    shift = _shift(ours, theirs)
    if shift is not None:
        start, by = shift
        return f"token ids from {start} on are shifted by {by:+d} (added tokens at other ids)"
    inner = ours[1:] if ours[:1] == [bos] else ours
    for name, longer, shorter in (("adds", theirs, inner), ("leaves out", ours, theirs)):
        at = _inside(longer, shorter)
        if at is not None:
            return f"the chat template {name} {at} tokens before and {len(longer) - len(shorter) - at} behind the same text"
    other = _other_template(ours, theirs, bos) if chat else ""
    if other:
        return other
    at = next(
        (n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), min(len(ours), len(theirs))
    )
    return f"they differ from position {at} on, {len(ours)} and {len(theirs)} tokens"


def _name(token: int, bos: object) -> str:
    return f"BOS ({token})" if token == bos else f"the token {token}"


def _shift(ours: list[int], theirs: list[int]) -> tuple[int, int] | None:
    """(lowest id, difference) where every different id is moved alike and all below the lowest are the same."""
    if len(ours) != len(theirs):
        return None
    moved = [(a, b - a) for a, b in zip(ours, theirs, strict=True) if a != b]
    if not moved or len({by for _, by in moved}) != 1:
        return None
    start = min(a for a, _ in moved)
    kept = [a for a, b in zip(ours, theirs, strict=True) if a == b]
    return (start, moved[0][1]) if all(a < start for a in kept) else None


def _other_template(ours: list[int], theirs: list[int], bos: object) -> str:
    """The words for two templates around the same message, empty where the rows have no message in common."""
    first = int(ours[:1] == theirs[:1] == [bos])
    same = SequenceMatcher(None, ours[first:], theirs[first:], autojunk=False).find_longest_match()
    if same.size < SAME_MESSAGE:
        return ""
    (a, b), (c, d) = ((at + first, len(row) - at - first - same.size) for row, at in ((ours, same.a), (theirs, same.b)))
    return (
        f"the chat template puts {c} tokens before and {d} behind the same {same.size} tokens of the message, "
        f"the reference's {a} and {b}"
    )


def _inside(longer: list[int], shorter: list[int]) -> int | None:
    """Where the shorter row stands inside the longer one; None for nowhere, or for a row too short to tell."""
    if not 2 <= len(shorter) < len(longer):
        return None
    return next((at for at in range(len(longer) - len(shorter) + 1) if longer[at : at + len(shorter)] == shorter), None)
