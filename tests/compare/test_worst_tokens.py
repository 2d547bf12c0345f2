"""The tokens that a report names are those whose logits differ most, at their own place, whatever the chunks."""

import torch

from parity_audit.compare.logits import SHOWN, LogitsSums
from parity_audit.core.types import Probe

TOKENS, VOCAB = 40, 11
PROBE = Probe(
    name="batch", purpose="test", token_ids=(tuple(range(TOKENS)), tuple(range(100, 100 + TOKENS))),
    mask=((1,) * TOKENS, (0,) * 5 + (1,) * (TOKENS - 5)),
)  # fmt: skip


def test_the_worst_tokens_are_found_at_their_place_in_any_chunks():
    torch.manual_seed(0)
    theirs = torch.randn(2, TOKENS, VOCAB)
    ours = theirs + 1e-3 * torch.rand(2, TOKENS, VOCAB)
    ours[1, 33, 4] = theirs[1, 33].max() + 5.0  # another likeliest token
    ours[0, 7, 2] -= 3.0
    ours[1, 2, 0] += 99.0  # padding
    ours[0, 9] = float("nan")
    keep = torch.tensor(PROBE.mask, dtype=torch.bool)
    sums = LogitsSums()
    for start in range(0, TOKENS, 16):
        part = slice(start, start + 16)
        sums.add(PROBE, start, ours[:, part], theirs[:, part], keep[:, part])
    first, second, *rest = sums.worst_tokens()

    assert (first.row, first.position, first.token_id, first.at_id, first.candidate_id) == (1, 33, 133, 4, 4)
    assert first.reference_id == int(theirs[1, 33].argmax())
    assert (second.row, second.position, second.at_id) == (0, 7, 2)
    assert second.max_abs == float((ours[0, 7].double() - theirs[0, 7].double()).abs().max())
    assert len(rest) == SHOWN - 2
    assert max(one.max_abs for one in rest) < 1e-3


def test_equal_logits_have_no_worst_token():
    sums = LogitsSums()
    sums.add(
        PROBE, 0, torch.ones(2, TOKENS, VOCAB), torch.ones(2, TOKENS, VOCAB), torch.ones(2, TOKENS, dtype=torch.bool)
    )
    assert sums.worst_tokens() == ()
