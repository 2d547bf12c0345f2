"""Engine settings that a user chooses by name, and when one of them counts as untested."""

from __future__ import annotations

import pytest

from parity_audit.core.errors import UsageError
from parity_audit.core.rollouts import Variation
from parity_audit.core.types import Description
from parity_audit.logprobs.semantics import not_tested
from parity_audit.logprobs.switches import engine_modes, own_steps


@pytest.mark.parametrize(
    ("mode", "cache", "settings"),
    [
        (None, None, {}),
        ("eager", None, {"enforce_eager": True}),
        ("compiled", None, {"enforce_eager": False}),
        (None, False, {"enable_prefix_caching": False}),
        ("compiled", True, {"enforce_eager": False, "enable_prefix_caching": True}),
    ],
)
def test_modes_are_load_settings(mode, cache, settings):
    assert engine_modes("vllm", mode, cache) == settings


def test_another_mode_is_refused():
    with pytest.raises(UsageError, match="engine mode"):
        engine_modes("vllm", "inductor", None)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_an_engine_with_one_mode_only_is_asked_for_none(mode):
    with pytest.raises(UsageError, match="sglang has one mode only") as caught:
        engine_modes("sglang", mode, None)
    assert (caught.value.code, caught.value.exit_code) == ("engine-mode", 2)
    assert engine_modes("sglang", None, True) == {"enable_prefix_caching": True}


COMPILED = {"enforce_eager": False, "compilation": "VLLM_COMPILE", "enable_prefix_caching": True}


@pytest.mark.parametrize(
    ("settings", "facts", "gaps"),
    [
        ({"enforce_eager": True, "enable_prefix_caching": False}, {}, {"compiled engine", "prefix cache"}),
        (COMPILED, {"cached_prompt_tokens": 128}, set()),
        ({**COMPILED, "compilation": "NONE"}, {}, {"compiled engine", "prefix cache"}),
        (COMPILED, {"cached_prompt_tokens": 0}, {"prefix cache"}),
        (COMPILED, {"cached_prompt_tokens": None}, {"prefix cache"}),
    ],
)  # fmt: skip
def test_a_setting_counts_only_by_the_engines_own_word(settings, facts, gaps):
    engine = Description(backend="vllm", package="vllm", version="0", settings=settings)

    assert {gap.what for gap in not_tested(engine, {}, facts)} == gaps


def test_steps_of_the_trainer_are_taken_out_of_its_settings():
    settings = {"attn_implementation": "sdpa", "head_dtype": "float32", "rows": 2}

    assert own_steps(settings) == ({"attn_implementation": "sdpa"}, Variation(head_dtype="float32", rows=2))


@pytest.mark.parametrize("settings", [{"head_dtype": "fp32"}, {"rope_dtype": 1}, {"rows": -1}, {"rows": "2"}])
def test_steps_that_no_trainer_has_are_refused(settings):
    with pytest.raises(UsageError):
        own_steps(settings)
