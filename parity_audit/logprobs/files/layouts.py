"""How each framework lays out a rollout: which key holds the ids, the mask, and the two log-probabilities.

Two shapes cover all of them. *Split* rows hold prompt and completion apart; *joined* rows hold the whole sequence, with a
mask of the tokens that were sampled. Log-probabilities of a joined row belong to the tokens at the same places, except
where `shifted` says that entry i is of token i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Keys of one framework's rows; alternatives of a key stand side by side, the newest first.

    `prompt` is empty for joined rows. `length` names the number of sampled tokens at the end of a joined row, for
    frameworks that have no whole mask. `prompt_mask` and `whole_mask` mark padding with 0.
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
