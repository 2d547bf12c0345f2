"""vLLM's OpenAI-compatible server: completions and prompt log-probabilities, as token ids (`POST /v1/completions`)."""

from __future__ import annotations

from typing import Any

from parity_audit.backends.endpoint import Endpoint, per_token, rows
from parity_audit.core.errors import BackendFailed
from parity_audit.core.rollouts import Completion, SampleReply, SampleRequest, ScoreReply, ScoreRequest, Scores

CACHED = "cached_prompt_tokens"
TOKEN_ID = "token_id:"
"""Prefix of each token id in an answer, if the server was asked for token ids instead of text."""


class VllmHttp:
    """A running vLLM server."""

    kind = package = "vllm"

    def __init__(self, endpoint: Endpoint, version: str, model: str) -> None:
        self.endpoint, self.version, self.model = endpoint, version, model

    @staticmethod
    def recognised(endpoint: Endpoint) -> VllmHttp | None:
        """Return a client if the server answers `/version` and `/v1/models` as vLLM's does, else None."""
        about, served = endpoint.find("/version"), endpoint.find("/v1/models")
        if not isinstance(about, dict) or not isinstance(served, dict) or not served.get("data"):
            return None
        return VllmHttp(endpoint, str(about.get("version", "")), str(served["data"][0].get("id", "")))

    def settings(self) -> dict[str, Any]:
        """Return no settings, since a vLLM server does not report them."""
        return {}

    def sample(self, request: SampleRequest) -> SampleReply:
        """Draw completions; all settings are explicit, so that a checkpoint's generation_config.json changes nothing."""
        own = request.sampling
        body = {
            "temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k, "n": own.samples, "seed": own.seed,
            "max_tokens": own.max_new_tokens, "logprobs": 1, "ignore_eos": own.ignore_eos, "repetition_penalty": 1.0,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip
        prompts = [list(ids) for ids in request.prompts]
        reply = self._ask(prompts, body)
        found = rows(reply["choices"], len(prompts) * own.samples, "completions")
        drawn = [_completion(prompts[number // own.samples], choice) for number, choice in enumerate(found)]
        return SampleReply(completions=tuple(drawn), facts={CACHED: _cached(reply)})

    def score(self, request: ScoreRequest) -> ScoreReply:
        """Return the log-probability of each completion token, and the likeliest token at its position.

        Each completion is scored in one prompt pass (prefill).

        Raises:
            NotImplementedError: the decode path was asked for, but a server cannot be told which tokens to decode.
        """
        if request.decoded:
            raise NotImplementedError("a vLLM server cannot be told which tokens to decode")
        prompts = [[*one.prompt_ids, *one.token_ids] for one in request.completions]
        reply = self._ask(prompts, {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1})
        found = rows(reply["choices"], len(prompts), "completions")
        pairs = zip(request.completions, found, strict=True)
        return ScoreReply(scores=tuple(_scores(one, choice) for one, choice in pairs), facts={CACHED: _cached(reply)})

    def _ask(self, prompts: list[list[int]], body: dict[str, Any]) -> Any:
        reply = self.endpoint.post("/v1/completions", {"model": self.model, "prompt": prompts, **body})
        if not isinstance(reply, dict) or not isinstance(reply.get("choices"), list):
            raise BackendFailed("the server's answer has no `choices`", code="server-answer")
        return {**reply, "choices": sorted(reply["choices"], key=lambda choice: int(choice.get("index", 0)))}


def _completion(prompt: list[int], choice: dict[str, Any]) -> Completion:
    about = choice.get("logprobs") or {}
    words = about.get("tokens") or []
    if not all(str(word).startswith(TOKEN_ID) for word in words):
        raise BackendFailed("the server returned text where token ids were asked for", code="server-answer")
    tokens = tuple(int(str(word)[len(TOKEN_ID) :]) for word in words)
    logprobs = per_token(about.get("token_logprobs") or [], len(tokens), "log-probabilities")
    return Completion(
        prompt_ids=tuple(prompt), token_ids=tokens, logprobs=tuple(float(value) for value in logprobs),
        finish_reason=str(choice.get("finish_reason") or ""),
    )  # fmt: skip


def _scores(one: Completion, choice: dict[str, Any]) -> Scores:
    entries = (choice.get("prompt_logprobs") or [])[len(one.prompt_ids) :]
    given = per_token(entries, len(one.token_ids), "log-probabilities")
    if not all(str(token) in entry for entry, token in zip(given, one.token_ids, strict=True)):
        raise BackendFailed("the server scored other tokens than it was given", code="server-answer")
    logprobs = tuple(float(entry[str(token)]["logprob"]) for entry, token in zip(given, one.token_ids, strict=True))
    top1 = tuple(int(next(token for token, about in entry.items() if about["rank"] == 1)) for entry in given)
    return Scores(logprobs=(logprobs,), top1=top1)


def _cached(reply: dict[str, Any]) -> int | None:
    """Return the number of prompt tokens that came from the prefix cache.

    Returns None if the server does not count them; it does so only with --enable-prompt-tokens-details.
    """
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    count = details.get("cached_tokens")
    return None if count is None else int(count)
