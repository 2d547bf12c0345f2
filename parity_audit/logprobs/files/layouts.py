"""How each framework lays out a rollout: which key holds the ids, the mask, and the two log-probabilities.

There are two kinds of rows. *Split* rows hold the prompt and the completion under separate keys; *joined* rows hold the whole
sequence, with a mask or a length that says which tokens were sampled. In a joined row, entry i of the log-probabilities belongs
to token i, or to token i + 1 if the layout is `shifted`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Keys of one framework's rows; a field lists the names that the key has in different releases, the newest first.

    `ids`: token ids of the completion (split rows) or of the whole sequence (joined rows).
    `rollout`, `train`: log-probabilities of the inference engine and of the trainer.
    `prompt`: token ids of the prompt; empty for joined rows.
    `mask`: 1 for sampled tokens.
    `length`: number of sampled tokens at the end of a joined row, for frameworks whose mask does not cover the whole row.
    `prompt_mask`, `whole_mask`: 0 for padding.
    """

    framework: str
    ids: tuple[str, ...]
    rollout: tuple[str, ...]
    train: tuple[str, ...] = ()
    prompt: tuple[str, ...] = ()
    prompt_mask: tuple[str, ...] = ()
    mask: tuple[str, ...] = ()
    whole_mask: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    shifted: bool = False


LAYOUTS = (
    Layout(
        framework="parity-audit", prompt=("prompt_ids",), ids=("token_ids",), rollout=("rollout_logprobs",),
        train=("train_logprobs",),
    ),
    Layout(
        framework="trl", prompt=("prompt_ids",), prompt_mask=("prompt_mask",), ids=("completion_ids",),
        mask=("completion_mask",), rollout=("sampling_per_token_logps", "logprobs"), train=("old_per_token_logps",),
    ),
    Layout(
        framework="verl", prompt=("prompts",), ids=("responses",), mask=("response_mask",), whole_mask=("attention_mask",),
        rollout=("rollout_log_probs",), train=("old_log_probs",),
    ),
    Layout(
        framework="slime", ids=("tokens",), length=("response_length",), mask=("loss_mask",), rollout=("rollout_log_probs",),
        train=("log_probs",),
    ),
    Layout(
        framework="nemo-rl", ids=("input_ids", "token_ids"), mask=("token_mask", "token_loss_mask"),
        rollout=("generation_logprobs",), train=("prev_logprobs",),
    ),
    Layout(
        framework="prime-rl", ids=("input_ids",), mask=("loss_mask",), rollout=("inference_logprobs",),
        train=("trainer_logprobs",),
    ),
    Layout(
        framework="openrlhf", ids=("sequences",), mask=("action_mask",), whole_mask=("attention_mask",),
        rollout=("rollout_log_probs",), train=("action_log_probs",), shifted=True,
    ),
    Layout(
        framework="open-instruct", ids=("query_responses",), mask=("response_masks",), whole_mask=("attention_masks",),
        rollout=("vllm_logprobs",), train=("local_logprobs", "old_logprobs"),
    ),
    Layout(
        framework="areal", ids=("input_ids",), mask=("loss_mask",), whole_mask=("attention_mask",), rollout=("logprobs",),
        train=("prox_logp",),
    ),
    Layout(framework="compare.py", prompt=("prompt_ids",), ids=("gen_ids",), rollout=("gen_logprobs",), train=("hf_logprobs",)),
)  # fmt: skip
