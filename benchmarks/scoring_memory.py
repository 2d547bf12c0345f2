"""Peak memory of scoring 8,192 tokens over a vocabulary of 256,000 under a budget, and the chunked result against the whole.

    python benchmarks/scoring_memory.py [--memory 2GiB] [--tokens 8192] [--vocab 256000] [--d-model 64]

The head alone is measured: hidden states and the weight of the head are there before the clock starts, and what the
process then takes on top of them is the cost of scoring. In the comparison all tokens are scored in chunks, in float64,
and every eighth of them once more without any chunk: the whole logits of 8,192 tokens in float64 would take 17 GB, and as
much again for their log-softmax. A token's score depends on no other token, so the rest is covered by the same code.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

COMPARED = 8
"""One token of so many is scored without chunks: 1,024 of 8,192, whose logits and their copies take 6 GB."""
TOLERANCE = 1e-10


def main() -> None:
    """Measure in fresh processes, because a process never gives its peak back."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=256_000)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--stage", choices=("peak", "compare"))
    given = parser.parse_args()
    if given.stage:
        print(json.dumps({"peak": peak, "compare": compare}[given.stage](given)))
        return
    failed = False
    for stage in ("peak", "compare"):
        done = subprocess.run(
            [sys.executable, __file__, "--stage", stage, *sys.argv[1:]], stdout=subprocess.PIPE, text=True, check=True
        )
        print(stage, done.stdout.strip().splitlines()[-1], flush=True)
        failed |= not json.loads(done.stdout.strip().splitlines()[-1])["within"]
    sys.exit(int(failed))


def peak(given: argparse.Namespace) -> dict[str, float]:
    """Peak resident memory above what was there before, over the budget."""
    import torch

    from parity_audit.backends.token_scores import score_tokens
    from parity_audit.cli.memory import bytes_of

    hidden, weight, targets = made(torch.float32, given.tokens, given)
    budget = bytes_of(given.memory)
    score_tokens(hidden[:8], targets[:8], lambda some: some @ weight.T, d_vocab=given.vocab, memory_bytes=budget)
    before, started = _peak_bytes(), time.perf_counter()
    found = score_tokens(hidden, targets, lambda some: some @ weight.T, d_vocab=given.vocab, memory_bytes=budget)
    above = _peak_bytes() - before
    return {
        "budget_bytes": budget, "above_bytes": above, "over_budget": above / budget, "within": above <= 1.3 * budget,
        "tokens": given.tokens, "d_vocab": given.vocab, "rows": found.chunk,
        "tokens_per_second": given.tokens / (time.perf_counter() - started),
    }  # fmt: skip


def compare(given: argparse.Namespace) -> dict[str, float]:
    """Largest difference of chunked and whole log-probabilities, both in float64."""
    import torch

    from parity_audit.backends.token_scores import score_tokens
    from parity_audit.cli.memory import bytes_of

    hidden, weight, targets = made(torch.float64, given.tokens, given)
    budget = bytes_of(given.memory)
    found = score_tokens(hidden, targets, lambda some: some @ weight.T, d_vocab=given.vocab, memory_bytes=budget)
    some = torch.arange(0, given.tokens, COMPARED)
    logits = hidden[some] @ weight.T
    whole = logits.gather(1, targets[some, None])[:, 0] - logits.logsumexp(-1)
    difference = float((found.logprobs[0][some] - whole).abs().max())
    return {
        "tokens": given.tokens, "compared_tokens": len(some), "d_vocab": given.vocab, "rows": found.chunk,
        "max_abs_difference": difference, "within": difference <= TOLERANCE,
    }  # fmt: skip


def made(dtype, tokens, given):
    """Hidden states `[token, d_model]`, the head's weight `[d_vocab, d_model]` and targets `[token]`."""
    import torch

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, given.d_model, generator=generator, dtype=dtype)
    weight = torch.randn(given.vocab, given.d_model, generator=generator, dtype=dtype) / given.d_model**0.5
    return hidden, weight, torch.randint(0, given.vocab, (tokens,), generator=generator)


def _peak_bytes() -> int:
    """Peak resident set of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
