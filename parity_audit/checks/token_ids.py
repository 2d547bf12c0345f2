"""How two tokenisations of the same texts differ, in the words of what usually goes wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from parity_audit.diagnose.thresholds import SHOWN


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that a config calls BOS, EOS and padding; `named`: what each is called, by its id."""

    bos: object = None
    named: Mapping[int, str] = field(default_factory=dict)

    def words(self, token: int) -> str:
        """What a message calls a token: `EOS (3)` or `the token 7`."""
        return f"{self.named[token]} ({token})" if token in self.named else f"the token {token}"


@dataclass(frozen=True)
class TwoRows:
    """The token ids of one text on both sides. `chat`: both put chat messages through their template."""

    text: str
    ours: list[int]
    theirs: list[int]
    chat: bool = False


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The first position at which two rows differ; the shorter one's length where it is the beginning of the other."""
    pairs = zip(ours, theirs, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def special_tokens(config: Mapping[str, Any]) -> SpecialTokens:
    """The special tokens of a config. An id with two roles is called by the first of BOS, EOS and padding."""
    named: dict[int, str] = {}
    for key, name in (("bos_token_id", "BOS"), ("eos_token_id", "EOS"), ("pad_token_id", "padding")):
        given = config.get(key)
        for token in given if isinstance(given, list) else [given]:
            if isinstance(token, int):
                named.setdefault(token, name)
    return SpecialTokens(config.get("bos_token_id"), named)


def ways_they_differ(rows: Sequence[TwoRows], special: SpecialTokens) -> list[tuple[str, list[TwoRows]]]:
    """What is wrong, each with the texts in which it is seen, the most frequent first; at most `SHOWN`.

    Shifted ids begin at one id for all texts together: a text shows the lowest of its own only.
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
    """A candidate's token ids `theirs` beside the reference's `ours` of the same text, which are others.

    A special token doubled, missing or added, padding, a cut, ids shifted from one on (added tokens), another chat
    template, or the first difference. `chat`: both sides put chat messages through their template.
    """
    ways = _at_the_ends(list(ours), list(theirs), special)
    words = next(ways, "") or _otherwise(list(ours), list(theirs), special, chat=chat)
    at = first_difference(ours, theirs)
    return words or f"they differ from position {at} on, {len(ours)} and {len(theirs)} tokens"


def _at_the_ends(ours: list[int], theirs: list[int], special: SpecialTokens) -> Iterator[str]:
    """One row is the other with something put to one of its ends, or taken from it."""
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
    """Shifted ids, a template around the same text, or two of them around the same message; empty for none of these."""
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
    """(lowest id, difference) where every different id is moved alike and all below the lowest are the same."""
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
    """The words for two templates around the same message, empty where the rows have no message in common."""
    same = SequenceMatcher(None, ours, theirs, autojunk=False).find_longest_match()
    if same.size <= 1:  # one id that both have is no message
        return ""
    (a, b), (c, d) = ((at, len(row) - at - same.size) for row, at in ((ours, same.a), (theirs, same.b)))
    return (
        f"the chat template puts {c} tokens before and {d} behind the same {same.size} tokens of the message, "
        f"the reference's {a} and {b}"
    )


def _inside(longer: list[int], shorter: list[int]) -> int | None:
    """Where the shorter row stands inside the longer one; None for nowhere, or for a row too short to tell."""
    if not 2 <= len(shorter) < len(longer):
        return None
    return next((at for at in range(len(longer) - len(shorter) + 1) if longer[at : at + len(shorter)] == shorter), None)
