"""What a model is given to go on from: its own cache where that grows, the one that `generate` prepares where it does not."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import cache_utils

from parity_audit.backends.caches import Continued
from parity_audit.backends.decoding import StepInputs


class Fixed:
    """A cache of a fixed length, with the arguments that those of transformers 4.51 take."""

    def __init__(self, config, rows, length, device, dtype):
        self.rows, self.max_cache_len, self.dtype = rows, length, dtype


class Model(nn.Module):
    """Returns the cache that it is given, or makes one: of the tokens that it sees, that grows, or none."""

    def __init__(self, makes, kind="hybrid"):
        super().__init__()
        self.config = SimpleNamespace(cache_implementation=kind)
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.makes, self.calls = makes, []

    def forward(self, input_ids, past_key_values=None, **given):
        self.calls.append(given | {"cache": past_key_values, "tokens": input_ids.shape})
        made = self.makes(*input_ids.shape) if past_key_values is None else past_key_values
        return SimpleNamespace(past_key_values=made)


def of_its_own_length(rows, length):
    return Fixed(None, rows, length, "cpu", torch.float32)


def growing(rows, length):
    return SimpleNamespace(max_cache_len=-1)


@pytest.fixture(autouse=True)
def a_release_with_hybrid_caches(monkeypatch):
    monkeypatch.setattr(cache_utils, "HybridCache", Fixed, raising=False)


def steps(model):
    """Four tokens of two rows, then two of one each."""
    continued = Continued(model, "cpu")
    for new in (4, 1, 1):
        inputs = StepInputs(tokens=torch.zeros(2, new, dtype=torch.long), length=6)
        continued.keep(model(input_ids=inputs.tokens, **{"use_cache": True, **continued.given(inputs)}))
    return model.calls[-3:]


@pytest.mark.parametrize("makes", [of_its_own_length, lambda rows, length: None])
def test_a_cache_without_room_is_made_as_long_as_the_whole_text(makes):
    calls = steps(Model(makes))
    cache = calls[0]["cache"]

    assert (cache.rows, cache.max_cache_len, cache.dtype) == (2, 6, torch.float64)
    assert all(call["cache"] is cache for call in calls)
    assert [call["cache_position"].tolist() for call in calls] == [[0, 1, 2, 3], [4], [5]]
    assert [tuple(call["attention_mask"].shape) for call in calls] == [(2, 4), (2, 5), (2, 6)]


@pytest.mark.parametrize("model", [Model(growing), Model(of_its_own_length, kind=None)])
def test_a_model_is_left_to_its_own_cache_otherwise(model):
    calls = steps(model)

    assert calls[0]["cache"] is None
    assert calls[1]["cache"] is calls[2]["cache"] is not None
    assert all(call.keys() == {"cache", "tokens", "use_cache"} for call in calls)


def test_a_model_that_returns_no_cache_says_so():
    with pytest.raises(NotImplementedError, match="the model returned none"):
        steps(Model(lambda rows, length: None, kind="static"))
