"""Describe how two tokenisations of the same texts differ, in terms of the usual mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from parity_audit.diagnose.thresholds import SHOWN


@dataclass(frozen=True)
class SpecialTokens:
    """The special token ids of a config; `named` maps an id to its name: BOS, EOS or padding."""

    bos: object = None
    named: Mapping[int, str] = field(default_factory=dict)

    def words(self, token: int) -> str:
        """Return the words for a token in a message: `EOS (3)` or `the token 7`."""
        return f"{self.named[token]} ({token})" if token in self.named else f"the token {token}"


@dataclass(frozen=True)
class TwoRows:
    """The token ids of one text: `ours` from the reference, `theirs` from the candidate.

    `chat`: the text is chat messages, which both sides put through their chat template.
    """

    text: str
    ours: list[int]
    theirs: list[int]
    chat: bool = False


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the first position at which two rows differ; the shorter length if one row is the beginning of the other."""
    pairs = zip(ours, theirs, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def special_tokens(config: Mapping[str, Any]) -> SpecialTokens:
    """Return the special tokens of a config. An id with several roles is named by the first of BOS, EOS and padding."""
    named: dict[int, str] = {}
    for key, name in (("bos_token_id", "BOS"), ("eos_token_id", "EOS"), ("pad_token_id", "padding")):
        given = config.get(key)
        for token in given if isinstance(given, list) else [given]:
            if isinstance(token, int):
                named.setdefault(token, name)
    return SpecialTokens(config.get("bos_token_id"), named)


def ways_they_differ(rows: Sequence[TwoRows], special: SpecialTokens) -> list[tuple[str, list[TwoRows]]]:
    """Return descriptions of the differences, each with its texts, the most frequent first; at most `SHOWN`.

    Whether ids are shifted from some id on is decided over all texts together, because one text shows only the ids it contains.
    """
    found: dict[str, list[TwoRows]] = {}
    shifts = [_shift(row.ours, row.theirs) for row in rows]
    shifted = [row for row, shift in zip(rows, shifts, strict=True) if shift is not None]
    together = _shift([a for row in shifted for a in row.ours], [b for row in shifted for b in row.theirs])
    for row, shift in zip(rows, shifts, strict=True):
        if together is not None and shift is not None:
            words = _shifted(*together)
        else:
            words = how_ids_differ(row.ours, row.theirs, special, chat=row.chat)
        found.setdefault(words, []).append(row)
    return sorted(found.items(), key=lambda item: -len(item[1]))[:SHOWN]


def how_ids_differ(ours: Sequence[int], theirs: Sequence[int], special: SpecialTokens, *, chat: bool = False) -> str:
    """Describe how a candidate's token ids `theirs` differ from the reference's `ours` of the same text.

    The possible descriptions are a special token doubled, missing or added, padding, truncation, ids shifted from some id on
    (added tokens), another chat template, or else the first difference. `chat`: both sides applied their chat template.
    """
    ways = _at_the_ends(list(ours), list(theirs), special)
    words = next(ways, "") or _otherwise(list(ours), list(theirs), special, chat=chat)
    at = first_difference(ours, theirs)
    return words or f"they differ from position {at} on, {len(ours)} and {len(theirs)} tokens"


def _at_the_ends(ours: list[int], theirs: list[int], special: SpecialTokens) -> Iterator[str]:
    """Yield descriptions of rows that differ only by tokens added to, or removed from, one end."""
    if not ours or not theirs:
        return
    more = len(theirs) - len(ours)
    first, last = theirs[:1] * more, theirs[-1:] * more
    if more > 0 and theirs == ours[:1] * more + ours:
        yield f"{special.words(ours[0])} stands {'twice' if more == 1 else f'{more + 1} times'} at the start"
    if more > 0 and theirs in (first + ours, ours + last):
        start, times = theirs == first + ours, "" if more == 1 else f" {more} times"
        yield f"{special.words(theirs[0 if start else -1])} is put{times} {'in front' if start else 'at the end'}"
    if more == -1 and theirs == ours[1:]:
        yield f"{special.words(ours[0])} is missing at the start"
    if more == -1 and theirs == ours[:-1] and ours[-1] in special.named:
        yield f"{special.words(ours[-1])} is missing at the end"
    if more < 0 and theirs == ours[:more]:
        yield f"the last tokens are cut off, to a length of {len(theirs)}"
    bos = int(ours[:1] == theirs[:1] == [special.bos])
    if more < 0 and theirs[bos:] == ours[bos - more :]:
        yield f"the first tokens are cut off, to a length of {len(theirs)}"


def _otherwise(ours: list[int], theirs: list[int], special: SpecialTokens, *, chat: bool) -> str:
    """Describe shifted ids, a chat template on one side only, or two different templates; empty for none of these."""
    shift = _shift(ours, theirs)
    if shift is not None:
        return _shifted(*shift)
    bos = int(ours[:1] == [special.bos])
    same = int(bos and theirs[:1] == [special.bos])
    for name, longer, shorter in (("adds", theirs[same:], ours[bos:]), ("leaves out", ours[same:], theirs[same:])):
        at = _inside(longer, shorter)
        if at is not None:
            return f"the chat template {name} {at} tokens before and {len(longer) - len(shorter) - at} behind the same text"
    return _other_template(ours[same:], theirs[same:]) if chat else ""


def _shift(ours: list[int], theirs: list[int]) -> tuple[int, int] | None:
    """Return (lowest shifted id, shift) if all ids from some id on differ by the same shift and all lower ids agree."""
    if len(ours) != len(theirs):
        return None
    moved = [(a, b - a) for a, b in zip(ours, theirs, strict=True) if a != b]
    if not moved or len({by for _, by in moved}) != 1:
        return None
    start = min(a for a, _ in moved)
    kept = [a for a, b in zip(ours, theirs, strict=True) if a == b]
    return (start, moved[0][1]) if all(a < start for a in kept) else None


def _shifted(start: int, by: int) -> str:
    return f"token ids from {start} on are shifted by {by:+d} (added tokens at other ids)"


def _other_template(ours: list[int], theirs: list[int]) -> str:
    """Describe two templates around the same message; empty if the rows share no run of at least two tokens."""
    same = SequenceMatcher(None, ours, theirs, autojunk=False).find_longest_match()
    if same.size <= 1:  # a single common id is not a message
        return ""
    (a, b), (c, d) = ((at, len(row) - at - same.size) for row, at in ((ours, same.a), (theirs, same.b)))
    return (
        f"the chat template puts {c} tokens before and {d} behind the same {same.size} tokens of the message, "
        f"the reference's {a} and {b}"
    )


def _inside(longer: list[int], shorter: list[int]) -> int | None:
    """Return where the shorter row occurs inside the longer one; None if it does not, or has fewer than two tokens."""
    if not 2 <= len(shorter) < len(longer):
        return None
    return next((at for at in range(len(longer) - len(shorter) + 1) if longer[at : at + len(shorter)] == shorter), None)
