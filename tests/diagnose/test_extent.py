"""Where an error holds, read off which tokens are wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_port import probe

from parity_audit.core.report import Finding
from parity_audit.diagnose.extent import only_where, with_extents

SHORT, RAGGED = probe("short", (48,)), probe("ragged", (40, 23, 9), seed=2)
PADDED = probe("left_padded", (40, 23, 9), seed=3, pad="left")
EIGHT, ONE = probe("batch", (10,) * 8, seed=5), probe("one", (1,), seed=6)
USED = replace(SHORT, name="again")
DECODED = replace(probe("decode", (28,), seed=4), decode_from=20)
BATCH = replace(probe("decode_batch", (28, 21, 15), seed=7, pad="left"), decode_from=20)
CONTINUED = replace(probe("continued", (20,), seed=8), decode_from=12, at_once=8)
PROBES = (SHORT, RAGGED, PADDED, DECODED, EIGHT, ONE, USED, BATCH, CONTINUED)
SITE = "blocks.1.attn_out"


class Shown:
    """As much of a capture as is asked for."""

    def __init__(self, tensors):
        self.probes, self.tensors = PROBES, tensors

    def sites(self, name):
        return {SITE}

    def tensor(self, name, site):
        return self.tensors[name]


def real_positions(of):
    mask = torch.tensor(of.mask)
    return mask.cumsum(1) - 1


def said(rule, dtype="float32", by=1.1, known=None, knob="x"):
    """What is said when tokens for which `rule(probe, position, row)` holds are wrong by a factor."""
    g = torch.Generator().manual_seed(0)
    true = {of.name: torch.randn(*of.shape, 16, generator=g) for of in PROBES}
    own = {}
    for of in PROBES:
        row = torch.arange(of.shape[0])[:, None].expand(of.shape)
        wrong = rule(of, real_positions(of), row)
        own[of.name] = torch.where(wrong[..., None], by * true[of.name], true[of.name])
    finding = Finding(
        knob=knob, kind="variant", layers=(1,), site=SITE, reference_value=None, candidate_value=None, message="m"
    )
    finding = finding if known is None else only_where(finding, known)
    return with_extents([finding], [(Shown(own), Shown(true))], dtype)[0][0].evidence.get("extent")


def columns(of):
    return torch.arange(of.shape[1]).expand(of.shape)


def decoded(of):
    """Tokens that were decoded from the cache."""
    return columns(of) >= (of.shape[1] if of.decode_from is None else of.decode_from)


def ends(of, position):
    """The last token of each row; decoded ones, and the end of their prompt, were the last when they were computed."""
    if of.decode_from is not None:
        return (columns(of) == of.decode_from - 1) | (columns(of) >= of.decode_from + of.at_once - 1)
    return torch.tensor(of.mask).bool() & (position == torch.tensor(of.mask).sum(1, keepdim=True) - 1)


def everywhere(of, position, row):
    return torch.ones_like(position, dtype=torch.bool)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda of, p, row: p >= 20, "at positions from 20 on"),
        (lambda of, p, row: decoded(of), "in tokens decoded from the cache"),
        (
            lambda of, p, row: decoded(of) & (of is not CONTINUED),
            "in tokens decoded from the cache one at a time",
        ),
        (lambda of, p, row: decoded(of) & (of is CONTINUED), "in tokens decoded from the cache several at a time"),
        (
            lambda of, p, row: decoded(of) & (of is CONTINUED) & ~ends(of, p),
            "in tokens decoded from the cache several at a time",
        ),
        (
            lambda of, p, row: decoded(of) & (row > 0),
            "in tokens decoded from the cache, in rows that are padded on the left",
        ),
        (
            lambda of, p, row: decoded(of) & (len(of.mask) > 1),
            "in tokens decoded from the cache, in batches of more than one row",
        ),
        (lambda of, p, row: ends(of, p), "at the last token of a row"),
        (lambda of, p, row: p < 4, "at positions up to 3"),
        (lambda of, p, row: (p >= 5) & (p <= 9), "at positions 5 to 9"),
        (lambda of, p, row: (row == 1) & (len(of.mask) > 1), "in row 1 of a batch"),
        (lambda of, p, row: everywhere(of, p, row) & (of is EIGHT), "in batches of 8 rows or more"),
        (lambda of, p, row: everywhere(of, p, row) & (of is ONE), "in texts of 1 token"),
        (lambda of, p, row: everywhere(of, p, row) & (of is USED), "when the model was used before on other texts"),
        (lambda of, p, row: torch.isin(torch.tensor(of.token_ids), torch.tensor([5, 77])), "at the token ids 5, 77"),
        (lambda of, p, row: (row >= 1) & (row <= 2) & (len(of.mask) > 1), "in rows 1, 2 of a batch"),
        (lambda of, p, row: everywhere(of, p, row) & (len(of.mask) > 1), "in batches of more than one row"),
        (
            lambda of, p, row: everywhere(of, p, row) & (of in (PADDED, BATCH)) & (row > 0),
            "in rows that are padded on the left",
        ),
        (
            lambda of, p, row: everywhere(of, p, row) & (of is RAGGED) & (row > 0),
            "in rows that are padded on the right",
        ),
    ],
)
def test_a_rule_is_said(rule, words):
    assert said(rule) == words


def test_what_only_decoded_tokens_say_is_said_more_closely_where_it_holds_in_some_of_them():
    def told(rule):
        return said(rule, known="in tokens decoded from the cache")

    assert (
        told(lambda of, p, row: decoded(of) & (of is CONTINUED)) == "in tokens decoded from the cache several at a time"
    )
    assert told(lambda of, p, row: p >= 20) == "in tokens decoded from the cache"


@pytest.mark.parametrize("rule", [everywhere, lambda of, p, row: ~everywhere(of, p, row), lambda of, p, row: p >= 1])
def test_what_holds_everywhere_or_nowhere_is_not_said(rule):
    assert said(rule) is None


def test_tokens_without_a_rule_are_not_given_one():
    assert said(lambda of, p, row: (p * 7 + row) % 3 == 0) is None


def test_rounding_is_not_wrong():
    assert said(lambda of, p, row: p >= 20, by=1 + 1e-7) is None


def test_nothing_is_said_in_coarse_dtypes():
    assert said(lambda of, p, row: p >= 20, dtype="bfloat16") is None


def test_a_window_says_itself_from_where_on_it_acts():
    def far(of, position, row):
        return position >= 20

    assert "at positions from 20 on" in said(far)
    assert said(far, knob="attention.window") is None
    assert said(lambda of, position, row: row == 1, knob="attention.window") is not None
