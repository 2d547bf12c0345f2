"""SGLang's HTTP server: completions and log-probabilities of given tokens, as token ids only (`POST /generate`).

Log-probabilities of prompt tokens do not pass the sampler and are always those of temperature 1. Log-probabilities of
sampled tokens belong to the distribution after the temperature is applied, unless the server runs with
SGLANG_RETURN_ORIGINAL_LOGPROB=1.
"""

from __future__ import annotations

from typing import Any

from parity_audit.backends.endpoint import Endpoint, per_token, rows
from parity_audit.backends.sglang_settings import PREFIX_CACHE
from parity_audit.core.errors import BackendFailed
from parity_audit.core.rollouts import Completion, SampleReply, SampleRequest, ScoreReply, ScoreRequest, Scores

CACHED = "cached_prompt_tokens"
SHOWN = (
    "attention_backend",
    "sampling_backend",
    "dtype",
    "kv_cache_dtype",
    "tp_size",
    "device",
    "quantization",
    "max_running_requests",
)


class SglangHttp:
    """A running SGLang server."""

    kind = package = "sglang"
    vocabulary: int | None = None
    """Number of token ids of the model, or None if unknown.

    It is needed because SGLang 0.5.23 reports id 0 in place of the last token id in the log-probabilities of prompts.
    """

    def __init__(self, endpoint: Endpoint, info: dict[str, Any]) -> None:
        self.endpoint, self.info = endpoint, info

    @staticmethod
    def recognised(endpoint: Endpoint) -> SglangHttp | None:
        """Return a client if the server at `endpoint` is SGLang's, else None."""
        info = endpoint.find("/server_info") or endpoint.find("/get_server_info")
        return SglangHttp(endpoint, info) if isinstance(info, dict) and "model_path" in info else None

    @property
    def model(self) -> str:
        """Path or name of the served model, as the server reports it."""
        return str(self.info.get("model_path", ""))

    @property
    def version(self) -> str:
        """SGLang's version, as the server reports it."""
        return str(self.info.get("version", ""))

    def settings(self) -> dict[str, Any]:
        """Return the settings in force that can change results."""
        shown = {key: self.info[key] for key in SHOWN if isinstance(self.info.get(key), (str, int, float, bool))}
        return {**shown, PREFIX_CACHE: not self.info.get("disable_radix_cache", False)}

    def sample(self, request: SampleRequest) -> SampleReply:
        """Draw completions; all settings are explicit, so that a checkpoint's generation_config.json changes nothing."""
        own = request.sampling
        prompts = [list(ids) for ids in request.prompts for _ in range(own.samples)]
        sampling = {
            "temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k or -1, "min_p": 0.0,
            "max_new_tokens": own.max_new_tokens, "ignore_eos": own.ignore_eos, "repetition_penalty": 1.0,
        }  # fmt: skip
        replies = self._ask(prompts, sampling, logprob_start_len=-1)
        drawn = [_completion(ids, reply) for ids, reply in zip(prompts, replies, strict=True)]
        return SampleReply(completions=tuple(drawn), facts=_facts(replies))

    def score(self, request: ScoreRequest) -> ScoreReply:
        """Return the log-probability of each completion token, and the likeliest token at its position.

        Each completion is scored in one prompt pass (prefill).

        Raises:
            NotImplementedError: the decode path was asked for, but this engine cannot be told which tokens to decode.
        """
        if request.decoded:
            raise NotImplementedError("SGLang cannot be told which tokens to decode")
        prompts = [[*one.prompt_ids, *one.token_ids] for one in request.completions]
        # Log-probabilities start at the last prompt token, so that the tokens before it may come from the radix cache.
        starts = [len(one.prompt_ids) - 1 for one in request.completions]
        asked = {"max_new_tokens": 0, "temperature": 0.0}
        replies = self._ask(prompts, asked, logprob_start_len=starts, top_logprobs_num=1)
        pairs = zip(request.completions, replies, strict=True)
        scores = tuple(_scores(one, reply, self.vocabulary) for one, reply in pairs)
        return ScoreReply(scores=scores, facts=_facts(replies))

    def _ask(self, prompts: list[list[int]], sampling: dict[str, Any], **more: Any) -> list[Any]:
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True, **more}
        return rows(self.endpoint.post("/generate", body), len(prompts), "completions")


def _completion(prompt: list[int], reply: dict[str, Any]) -> Completion:
    tokens, about = _field(reply, "output_ids"), _field(reply, "meta_info")
    returned = per_token(_field(about, "output_token_logprobs"), len(tokens), "log-probabilities")
    if [entry[1] for entry in returned] != list(tokens):
        raise BackendFailed("the server's log-probabilities are of other tokens than it returned", code="server-answer")
    reason = about.get("finish_reason") or {}
    return Completion(
        prompt_ids=tuple(prompt), token_ids=tuple(tokens), logprobs=tuple(float(entry[0]) for entry in returned),
        finish_reason=str(reason.get("type", "")),
    )  # fmt: skip


def _scores(one: Completion, reply: dict[str, Any], vocabulary: int | None) -> Scores:
    """Return the scores of one completion, after a check that they belong to its tokens; see `SglangHttp.vocabulary`."""
    about = _field(reply, "meta_info")
    whole = len(one.prompt_ids) + len(one.token_ids)
    given = _field(about, "input_token_logprobs")[len(one.prompt_ids) - whole :]
    top = _field(about, "input_top_logprobs")[len(one.prompt_ids) - whole :]
    count = len(one.token_ids)
    entries, likeliest = per_token(given, count, "log-probabilities"), per_token(top, count, "likeliest tokens")
    misnamed = None if vocabulary is None else vocabulary - 1
    named = [(entry[1], token) for entry, token in zip(entries, one.token_ids, strict=True)]
    if any(name != token and (name, token) != (0, misnamed) for name, token in named):
        raise BackendFailed("the server scored other tokens than it was given", code="server-answer")
    return Scores(
        logprobs=(tuple(float(entry[0]) for entry in entries),), top1=tuple(int(entry[0][1]) for entry in likeliest)
    )


def _field(reply: Any, name: str) -> Any:
    if not isinstance(reply, dict) or reply.get(name) is None:
        raise BackendFailed(f"the server's answer has no `{name}`", code="server-answer")
    return reply[name]


def _facts(replies: list[Any]) -> dict[str, Any]:
    """Return the number of prompt tokens that the engine took from its radix cache, by its own counter."""
    return {CACHED: sum(int(_field(reply, "meta_info").get("cached_tokens") or 0) for reply in replies)}
