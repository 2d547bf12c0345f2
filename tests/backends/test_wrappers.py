"""Wrapped models are seen through, whatever wraps them and however deep."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from parity_audit.backends.python_port import dropping, kind_of
from parity_audit.backends.wrappers import unwrapped


@pytest.fixture(scope="module")
def model():
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16))


@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, torch.compile, nn.DataParallel, lambda x: nn.DataParallel(torch.compile(x)),
     lambda x: torch.compile(nn.DataParallel(x))],
    ids=["bare", "compiled", "parallel", "parallel of compiled", "compiled of parallel"],
)  # fmt: skip
def test_the_model_inside_is_reached(model, wrap):
    inner = unwrapped(wrap(model))

    assert inner is model
    assert kind_of(inner) == "hf"


def test_a_module_of_any_other_kind_is_itself():
    plain = nn.Sequential(nn.Linear(2, 2))

    assert unwrapped(plain) is plain


@pytest.mark.parametrize(("share", "said"), [(0.1, 1), (0.0, 0)])
def test_dropout_that_is_active_where_a_model_is_handed_over_is_said(share, said):
    plain = nn.Sequential(nn.Linear(2, 2), nn.Dropout(share))

    assert len(dropping(plain.train())) == said
    assert dropping(plain.eval()) == ()
