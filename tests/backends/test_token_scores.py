"""Teacher-forced log-probabilities against the plain forward pass, and the chunked head against the whole one."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from parity_audit.backends import hf_scores, token_scores
from parity_audit.backends.token_scores import log_kept, log_sum_exp, rows_for, score_tokens
from parity_audit.core.rollouts import Completion, ScoreRequest

MIB = 1 << 20


def _silent(*_: object) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def model(gemma):
    return transformers.AutoModelForCausalLM.from_pretrained(gemma.path, attn_implementation="eager").eval()


def _completions(d_vocab: int, count: int = 5) -> tuple[Completion, ...]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, d_vocab, (4 + 3 * number,), generator=generator).tolist() for number in range(count)]
    return tuple(Completion(prompt_ids=tuple(ids[:3]), token_ids=tuple(ids[3:])) for ids in drawn)


def _plain(model, completion: Completion, temperature: float) -> torch.Tensor:
    """Log-probabilities of one completion on its own, from the whole logits in float64."""
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
    logits = model(input_ids=ids).logits[0].double() / temperature
    start = len(completion.prompt_ids)
    return logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]


def test_batches_of_different_lengths_give_what_each_completion_gives_alone(model):
    """Soft-capped logits included: the head is the model's own. Batching may move the last bits of float32."""
    completions = _completions(model.config.vocab_size)
    reply = hf_scores.score(
        model, ScoreRequest(completions=completions, temperatures=(1.0, 0.7), batch_tokens=40), "cpu", _silent
    )

    for completion, scores in zip(completions, reply.scores, strict=True):
        with torch.no_grad():
            for row, temperature in zip(scores.logprobs, (1.0, 0.7), strict=True):
                assert torch.allclose(torch.tensor(row).double(), _plain(model, completion, temperature), atol=2e-5)


def test_the_decoder_works_again_afterwards(model):
    ids = torch.tensor([[5, 6, 7]])
    before = model(input_ids=ids).logits
    hf_scores.score(model, ScoreRequest(completions=_completions(50, 2)), "cpu", _silent)

    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("bad", [Completion(prompt_ids=(1,), token_ids=()), Completion(prompt_ids=(), token_ids=(1,))])
def test_a_completion_without_tokens_or_prompt_is_refused(model, bad):
    with pytest.raises(ValueError, match="completion 0"):
        hf_scores.score(model, ScoreRequest(completions=(bad,)), "cpu", _silent)


def _head(d_model: int, d_vocab: int):
    weight = torch.randn(d_vocab, d_model, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return lambda hidden: hidden @ weight.T


def test_chunks_give_what_the_whole_gives():
    """In float64 the product of a chunk differs from that of the whole by 1e-15, so 1e-10 is a matter of the sums."""
    d_vocab, tokens = 40_000, 37
    hidden = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.arange(tokens) * 7
    head = _head(16, d_vocab)
    small = 6 * (int(d_vocab * 8 * token_scores.LOGIT_COPIES) + token_scores.VOCAB_BLOCK * 8)
    chunked = score_tokens(hidden, targets, head, d_vocab=d_vocab, memory_bytes=small)
    whole = head(hidden).log_softmax(-1).gather(1, targets[:, None])[:, 0]

    assert chunked.chunk == 6
    assert (chunked.logprobs[0] - whole).abs().max() < 1e-10
    assert torch.equal(chunked.top1, head(hidden).argmax(-1))


def test_memory_that_runs_out_halves_the_chunk():
    rows = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        if len(hidden) > 10:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return _head(16, 100)(hidden)

    hidden = torch.ones(40, 16, dtype=torch.float64)
    scored = score_tokens(hidden, torch.zeros(40, dtype=torch.long), head, d_vocab=100, memory_bytes=MIB)

    assert rows[:2] == [40, 20]
    assert scored.chunk == 10
    assert scored.logprobs.shape == (1, 40)


def test_another_error_is_not_taken_for_lack_of_memory():
    def head(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        score_tokens(torch.ones(8, 4), torch.zeros(8, dtype=torch.long), head, d_vocab=10, memory_bytes=MIB)


def test_a_budget_below_four_tokens_is_refused_with_the_least_that_works():
    with pytest.raises(ValueError, match="give at least"):
        rows_for(MIB, 256_000, 4, 100)


def test_blocks_of_the_vocabulary_do_not_change_the_sum(monkeypatch):
    logits = 5 * torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(token_scores, "VOCAB_BLOCK", 64)

    assert torch.allclose(log_sum_exp(logits), logits.double().logsumexp(1), rtol=1e-14)


def test_the_kept_share_of_a_known_distribution():
    """p = (0.5, 0.3, 0.15, 0.05): top-p 0.7 keeps two (0.8); top-k 3 and then top-p 0.5 of the rest keeps one."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
    assert log_kept(logits, 0.7, 0, 1.0).item() == pytest.approx(math.log(0.8))
    assert log_kept(logits, 1.0, 3, 1.0).item() == pytest.approx(math.log(0.95))
    assert log_kept(logits, 0.5, 3, 1.0).item() == pytest.approx(math.log(0.5))
    assert log_kept(logits, 1.0, 0, 0.5).item() == pytest.approx(0.0, abs=1e-12)
