"""Greedy decoding with a model's own KV cache: a batch of prompts of equal length, one token at a time."""

from __future__ import annotations

import torch

from parity_audit.backends.decoding import Step, StepInputs
from parity_audit.backends.taps import returned_logits
from parity_audit.core.rollouts import Completion, SampleReply, SampleRequest


def greedy(request: SampleRequest, step: Step, device: str) -> SampleReply:
    """Return greedy completions of all prompts, run as one batch.

    Every completion has `max_new_tokens` tokens; an end-of-sequence token does not stop it.

    Raises:
        NotImplementedError: prompts of different lengths, more than one sample per prompt, or a temperature other than 0.
        ValueError: the model returned no logits.
    """
    own = request.sampling
    if len({len(ids) for ids in request.prompts}) != 1 or own.samples != 1 or own.temperature != 0.0:
        raise NotImplementedError(
            "greedy decoding of one batch takes prompts of one length, one sample and temperature 0"
        )
    tokens, drawn = torch.tensor(request.prompts, dtype=torch.long, device=device), []
    length = tokens.shape[1] + own.max_new_tokens
    with torch.no_grad():
        for _ in range(own.max_new_tokens):
            logits = returned_logits(step(StepInputs(tokens=tokens, length=length)))
            if logits is None:
                raise ValueError("the model returned no logits to choose a token from")
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            drawn.append(tokens)
    chosen = torch.cat(drawn, dim=1).tolist()
    return SampleReply(
        completions=tuple(
            Completion(prompt_ids=ids, token_ids=tuple(row)) for ids, row in zip(request.prompts, chosen, strict=True)
        )
    )
