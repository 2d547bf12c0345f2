"""Greedy decoding of a batch, held against transformers' own generate."""

from __future__ import annotations

import pytest
import torch
import transformers

from parity_audit.backends.hf import HfBackend
from parity_audit.core.rollouts import SampleRequest, Sampling
from parity_audit.core.wire import LoadRequest

PROMPTS = ((2, 40, 41, 42), (2, 90, 91, 92), (2, 7, 300, 12))


@pytest.fixture(scope="module")
def backend(llama):
    own = HfBackend()
    own.request = LoadRequest(checkpoint=llama, dtype="float32", device="cpu")
    own.model = transformers.AutoModelForCausalLM.from_pretrained(llama.path, attn_implementation="eager").eval()
    return own


def test_it_is_what_transformers_generates(backend):
    reply = backend.sample(
        SampleRequest(prompts=PROMPTS, sampling=Sampling(temperature=0.0, max_new_tokens=6, ignore_eos=True)), print
    )
    ids = torch.tensor(PROMPTS)
    theirs = backend.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, min_new_tokens=6, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip

    assert [one.prompt_ids for one in reply.completions] == list(PROMPTS)
    assert [list(one.token_ids) for one in reply.completions] == theirs[:, 4:].tolist()


@pytest.mark.parametrize(
    ("prompts", "sampling"),
    [
        ((PROMPTS[0], PROMPTS[1][:2]), Sampling(temperature=0.0)),
        (PROMPTS, Sampling(temperature=1.0)),
        (PROMPTS, Sampling(temperature=0.0, samples=2)),
    ],
)
def test_what_it_cannot_do_is_refused(backend, prompts, sampling):
    with pytest.raises(NotImplementedError, match="one length, one sample and temperature 0"):
        backend.sample(SampleRequest(prompts=prompts, sampling=sampling), print)
