"""Rotary embeddings of transformers' own models: what they do is read, clean ones agree, planted faults are named."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch
from loose import departing, loose, told
from tiny_port import probe
from torch import Tensor
from transformers import (
    CohereConfig,
    Gemma3TextConfig,
    GlmConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    Phi3Config,
    StableLmConfig,
)

from parity_audit.diagnose.evidence import Evidence

HEADS, KV = 4, 2
PROBES = (probe("short", (48,)), probe("ragged", (40, 23, 9), seed=2), probe("left", (40, 23, 9), pad="left", seed=3))
LONG = (*PROBES, probe("long", (700,), sites="residual", seed=4))
SIZES: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": KV, "num_hidden_layers": 2}
PART = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
PLAIN = {"rope_theta": 10000.0}
SHORT_FACTOR, LONG_FACTOR = [1.0 + 0.03 * j for j in range(24)], [1.4 + 0.9 * j for j in range(24)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT_FACTOR, "long_factor": LONG_FACTOR,
            "original_max_position_embeddings": 512, "factor": 16.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}

# name: (config, d_head, d_rot, pairing, theta, scaling in the spec)
MODELS: dict[str, tuple[Any, int, int, str, float, Any]] = {
    "llama": (lambda **k: LlamaConfig(head_dim=32, rope_parameters={"rope_theta": 20000.0, **k}, **SIZES),
              32, 32, "half", 20000.0, None),
    "gpt_neox": (lambda **k: GPTNeoXConfig(hidden_size=256, num_attention_heads=HEADS,
                                           rope_parameters={**PART, **k}),
                 64, 16, "half", 10000.0, None),
    "stablelm": (lambda **k: StableLmConfig(hidden_size=256, rope_parameters={**PART, **k}, **SIZES),
                 64, 16, "half", 10000.0, None),
    "glm": (lambda **k: GlmConfig(head_dim=64, rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.5, **k}, **SIZES),
            64, 32, "adjacent", 10000.0, None),
    "cohere": (lambda **k: CohereConfig(hidden_size=256, rope_parameters={"rope_theta": 75000.0, **k}, **SIZES),
               64, 64, "adjacent", 75000.0, None),
    "phi3": (lambda **k: Phi3Config(hidden_size=192, max_position_embeddings=8192, original_max_position_embeddings=512,
                                    pad_token_id=0, rope_parameters={"rope_theta": 10000.0, **LONGROPE, **k}, **SIZES),
             48, 48, "half", 10000.0, LONGROPE),
    "gpt_oss": (lambda **k: GptOssConfig(head_dim=64, rope_parameters={"rope_theta": 150000.0, **YARN, **k}, **SIZES),
                64, 64, "half", 150000.0, YARN),
    "dynamic": (lambda **k: LlamaConfig(head_dim=64, max_position_embeddings=512,
                                        rope_parameters={**PLAIN, **DYNAMIC, **k}, **SIZES),
                64, 64, "half", 10000.0, {**DYNAMIC, "max_position_embeddings": 512}),
}  # fmt: skip


def side(name: str, dtype: torch.dtype = torch.float32, *, probes: tuple = PROBES, positions: Any = None,
         scale: float = 1.0, **parameters: Any):  # fmt: skip
    """One layer's q, k and rotated q, k of every probe by the module of that model."""
    build, d_head, *_, theta, scaling = MODELS[name]
    kind = "llama" if name == "dynamic" else name
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    rotary = next(getattr(module, n) for n in dir(module) if n.endswith("RotaryEmbedding"))(build(**parameters))
    sites: dict[tuple[str, str], Tensor] = {}
    for at, item in enumerate(probes):
        g = torch.Generator().manual_seed(at)
        q, k = (
            torch.randn(*item.shape, heads, d_head, generator=g, dtype=torch.float64).to(dtype) for heads in (HEADS, KV)
        )
        mask = torch.tensor(item.mask)
        where = (mask.cumsum(1) - 1).clamp_min(0) if positions is None else positions(mask)
        cos, sin = rotary(q, where)
        if dtype == torch.float64 and scale == 1.0:
            cos, sin = cos.double(), sin.double()
        # Some attention modules split the rotated components off themselves.
        width = cos.shape[-1] if kind == "stablelm" else d_head
        heads_first = [x.transpose(1, 2) for x in (q, k)]
        turned = module.apply_rotary_pos_emb(*(x[..., :width] for x in heads_first), cos, sin)
        rot_q, rot_k = (torch.cat([x, y[..., width:]], -1) for x, y in zip(turned, heads_first, strict=True))
        sites |= {(item.name, "q"): q, (item.name, "k"): k, (item.name, "rot_q"): rot_q.transpose(1, 2) * scale,
                  (item.name, "rot_k"): rot_k.transpose(1, 2)}  # fmt: skip
    knobs = {
        "rope__theta": theta,
        "rope__scaling": scaling,
        "rope__partial": MODELS[name][2],
        "rope__pairing": MODELS[name][3],
    }
    narrow = str(dtype).removeprefix("torch.") if dtype.itemsize < 4 else None
    return loose({key: value.float() for key, value in sites.items()}, probes=probes, dtype=narrow, **knobs)


@pytest.mark.parametrize("probes", [PROBES, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", list(MODELS))
def test_models_are_what_their_specs_say(name: str, probes: tuple):
    assert departing(side(name, probes=probes)) == {}


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clean(name: str, dtype: torch.dtype):
    assert told(side(name, dtype, probes=LONG), side(name, torch.float64, probes=LONG)) == {}


def test_rounding_in_a_dtype_that_nobody_names_is_no_finding():
    rounded = {at: dataclasses.replace(evidence, dtype=None) for at, evidence in side("llama", torch.bfloat16).items()}

    assert told(rounded, side("llama", torch.float64)) == {}


def test_gptj_turns_64_of_256_components():
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb, create_sinusoidal_positions

    q, k = (torch.randn(1, 48, 1, 256, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    sin, cos = create_sinusoidal_positions(2048, 64)[None, :48].chunk(2, -1)
    rot_q, rot_k = (torch.cat([apply_rotary_pos_emb(x[..., :64], sin, cos), x[..., 64:]], -1) for x in (q, k))

    knobs = departing(loose({"q": q, "k": k, "rot_q": rot_q, "rot_k": rot_k}, rope__theta=10000.0))

    assert {knob: fit.value for knob, fit in knobs.items()} == {"rope.partial": 64, "rope.pairing": "adjacent"}


@pytest.mark.parametrize(("name", "wrong"), [("gpt_neox", 0.5), ("gpt_neox", 1.0), ("glm", 0.25), ("stablelm", 0.375)])
def test_wrong_partial(name: str, wrong: float):
    found = told(side(name, partial_rotary_factor=wrong), side(name, torch.float64))

    assert found.keys() == {"rope.partial"}
    assert found["rope.partial"].candidate_value == (None if wrong == 1.0 else 64 * wrong)
    assert found["rope.partial"].departs_from_spec == "candidate"


def near(value: object) -> object:
    return pytest.approx(value, rel=1e-3) if isinstance(value, float) else value


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("gpt_oss", {"factor": 16.0}, {"factor": 16.0}),
        ("gpt_oss", {"rope_type": "default"}, None),
        ("gpt_oss", {"attention_factor": 1.0}, {"attention_factor": 1.0}),
        ("gpt_oss", {"truncate": True}, {"truncate": True}),
        ("gpt_oss", {"beta_fast": 16.0}, {"beta_fast": 16.0}),
        ("gpt_oss", {"rope_type": "linear"}, {"rope_type": "linear", "factor": 32.0}),
        ("phi3", {"rope_type": "default"}, None),
        ("phi3", {"attention_factor": 1.0}, {"attention_factor": 1.0}),
        ("llama", YARN, {"rope_type": "yarn", "factor": 32.0}),
        ("llama", {"rope_type": "linear", "factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
    ],
)
def test_wrong_scaling(name: str, wrong: dict[str, Any], said: dict[str, Any] | None):
    found = told(side(name, **wrong), side(name, torch.float64))

    assert found.keys() == {"rope.scaling"}
    value = found["rope.scaling"].candidate_value
    assert value is None if said is None else {k: near(value[k]) for k in said} == said


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("phi3", {"long_factor": SHORT_FACTOR}, {**LONGROPE, "factors": "short at every length"}),
        ("phi3", {"short_factor": LONG_FACTOR}, {**LONGROPE, "factors": "long at every length"}),
        ("dynamic", {"rope_type": "default"}, None),
        ("dynamic", {"factor": 2.0}, {**DYNAMIC, "factor": pytest.approx(2.0, rel=1e-4), "max_position_embeddings": 512}),
    ],
)  # fmt: skip
def test_scaling_that_depends_on_the_length(name: str, wrong: dict[str, Any], said: Any):
    found = told(side(name, probes=LONG, **wrong), side(name, torch.float64, probes=LONG))

    assert found.keys() == {"rope.scaling"}
    assert found["rope.scaling"].candidate_value == said


def test_dynamic_scaling_where_the_spec_has_none():
    wrong = {"rope_type": "dynamic", "factor": 3.0}
    sides = [loose_llama(LONG, **extra) for extra in (wrong, {})]

    found = told(*sides)

    assert found.keys() == {"rope.scaling"}
    there = 10000.0 * (3.0 * 700 / 512 - 2.0) ** (64 / 62)
    assert found["rope.scaling"].candidate_value == {
        "rope_type": "dynamic", "beyond": 256, "theta_there": pytest.approx(there, rel=1e-5),
    }  # fmt: skip


def loose_llama(probes: tuple, **parameters: Any):
    MODELS["short llama"] = (
        lambda **k: LlamaConfig(head_dim=64, max_position_embeddings=512, rope_parameters={"rope_theta": 10000.0, **k}, **SIZES),
        64, 64, "half", 10000.0, None,
    )  # fmt: skip
    MODELS["dynamic"], kept = MODELS.pop("short llama"), MODELS["dynamic"]
    try:
        return side("dynamic", probes=probes, **parameters)
    finally:
        MODELS["dynamic"] = kept


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        (lambda mask: torch.arange(mask.shape[1])[None].expand_as(mask), "counted from the padding"),
        (lambda mask: (mask.cumsum(1) - 1).clamp_min(0) + 2, 2.0),
        (lambda mask: mask.cumsum(1).clamp_max(31) - 1, "stop at 30"),
        (lambda mask: (mask.cumsum(1) - 1) % 16, "start again after 15"),
        (lambda mask: (mask.cumsum(1) - 1) + ((mask.cumsum(1) - 1) > 5) * 3, "+3 from token 6 on"),
        (
            lambda mask: (mask.cumsum(1) - 1) + ((mask.cumsum(1) - 1) // 10 == 1) * 3,
            {f"token {place}": place + 3 for place in range(10, 20)},
        ),
    ],
)
@pytest.mark.parametrize("name", ["llama", "glm"])
def test_where_tokens_stand(name: str, positions: Any, said: object):
    found = told(side(name, positions=lambda mask: positions(mask).clamp_min(0)), side(name, torch.float64))

    assert found.keys() == {"rope.offset"}
    assert found["rope.offset"].candidate_value == said


def test_backwards():
    found = told(side("llama", positions=lambda mask: -(mask.cumsum(1) - 1).clamp_min(0)), side("llama"))

    assert found.keys() == {"rope.direction"}
    assert found["rope.direction"].candidate_value == "inverse"


@pytest.mark.parametrize(
    ("kept", "knob", "said"),
    [("q", "rope.layers", "q only"), ("k", "rope.layers", "k only"), ("", "rope.theta", None)],
)
def test_vectors_that_are_not_turned(kept: str, knob: str, said: str | None):
    reference = side("llama", torch.float64)
    plain = {"rot_q": "q", "rot_k": "k"}
    own = reference[0].tensor

    def tensor(name: str, site: str) -> Tensor | None:
        return own(name, plain[site] if site in plain and site[-1] != kept else site)

    found = told({0: dataclasses.replace(reference[0], tensor=tensor)}, reference)

    assert {name: finding.candidate_value for name, finding in found.items()} == {knob: said}


def test_q_and_k_with_different_tables():
    a, b = side("llama", torch.float64)[0], side("llama", rope_theta=5000.0)[0]
    mixed = dataclasses.replace(a, tensor=lambda p, site: (b if site == "rot_k" else a).tensor(p, site))

    found = told({0: mixed}, {0: a})

    assert found["rope.theta"].candidate_value == pytest.approx({"q": 20000.0, "k": 5000.0}, rel=1e-4)


def test_a_scale_put_on_q_is_no_rope_fault():
    assert told(side("llama", scale=32**-0.5), side("llama", torch.float64)) == {}


def test_a_port_that_turns_the_last_components():
    build = side("gpt_neox", torch.float64)[0]
    flipped = dataclasses.replace(
        build, tensor=lambda p, site: None if (x := build.tensor(p, site)) is None else x.roll(48, -1)
    )

    found = told({0: flipped}, {0: build})

    assert found.keys() == {"rope.first_dim"}
    assert found["rope.first_dim"].candidate_value == 48


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", ["cos and sin", "angles", "frequencies"])
def test_tables_in_a_narrow_dtype(dtype: torch.dtype, what: str):
    def low(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    table = 20000.0 ** (-torch.arange(0, 32, 2).float() / 32)
    angle = torch.arange(48).float()[:, None] * (low(table) if what == "frequencies" else table)
    angle = low(angle) if what == "angles" else angle
    cos, sin = (low(t) if what == "cos and sin" else t for t in (angle.cos(), angle.sin()))
    clean = side("llama", probes=PROBES[:1])[0]

    def tensor(name: str, site: str) -> Tensor | None:
        x = clean.tensor(name, site.removeprefix("rot_"))
        if x is None or not site.startswith("rot_"):
            return x
        a, b = x.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    found = told({0: dataclasses.replace(clean, tensor=tensor)}, {0: clean})

    assert found.keys() == {"rope.dtype"}
    assert found["rope.dtype"].candidate_value == f"{str(dtype).removeprefix('torch.')} {what}"


@pytest.mark.parametrize("what", ["frequencies", "angles"])
def test_angles_made_in_bfloat16_are_told_in_a_model_that_is_in_bfloat16(what: str):
    """As the buffers of a model are that is cast to bfloat16: a table of cos and sin is in that dtype anyway."""

    def low(x: Tensor) -> Tensor:
        return x.bfloat16().double()

    table = 20000.0 ** (-torch.arange(0, 32, 2).double() / 32)
    clean = side("llama", probes=(probe("short", (900,)),))[0]
    where = torch.arange(900).double()[:, None]

    def turned(angle: Tensor) -> Evidence:
        cos, sin = low(angle.cos())[:, None], low(angle.sin())[:, None]

        def tensor(name: str, site: str) -> Tensor | None:
            x = clean.tensor(name, site.removeprefix("rot_"))
            x = None if x is None else low(x)
            if x is None or not site.startswith("rot_"):
                return x
            a, b = x.chunk(2, -1)
            return low(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))

        return dataclasses.replace(clean, tensor=tensor, dtype="bfloat16")

    own = turned(where * low(table) if what == "frequencies" else low(where * table))
    found = told({0: own}, {0: clean})

    assert found.keys() == {"rope.dtype"}
    assert found["rope.dtype"].candidate_value == f"bfloat16 {what}"
    assert told({0: turned(where * table)}, {0: clean}) == {}


def test_two_bases_of_gemma3():
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding, apply_rotary_pos_emb

    config = Gemma3TextConfig(head_dim=64, layer_types=["sliding_attention", "full_attention"], rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}, **SIZES)  # fmt: skip
    rotary, where = Gemma3RotaryEmbedding(config), torch.arange(48)[None]
    q, k = (torch.randn(1, heads, 48, 64, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2))
    values = {}
    for layer_type in ("full_attention", "sliding_attention"):
        rot_q, rot_k = apply_rotary_pos_emb(q, k, *rotary(q, where, layer_type))
        sites = {"q": q, "k": k, "rot_q": rot_q, "rot_k": rot_k}
        knobs = departing(loose({s: x.transpose(1, 2) for s, x in sites.items()}, rope__theta=10000.0))
        values[layer_type] = {knob: fit.value for knob, fit in knobs.items()}

    assert values["sliding_attention"] == {}
    assert values["full_attention"] == {
        "rope.theta": pytest.approx(1e6, rel=1e-4),
        "rope.scaling": {"rope_type": "linear", "factor": pytest.approx(8, rel=1e-5)},
    }


def test_a_model_without_rotation_is_silent_when_nothing_is_visible():
    assert departing(loose({"q": torch.ones(1, 48, 2, 8)})) == {}


@pytest.mark.parametrize(
    ("positions", "said"),
    [(lambda place: place.clamp_max(2047), "stop at 2047"), (lambda place: place % 2048, "start again after 2047")],
)
def test_where_tokens_stand_in_a_long_text_alone(positions: Any, said: str):
    probes = (*PROBES[:1], probe("long", (4160,), sites="residual", seed=4))
    port = side("llama", probes=probes, positions=lambda mask: positions(mask.cumsum(1) - 1))

    found = told(port, side("llama", torch.float64, probes=probes))

    assert {knob: finding.candidate_value for knob, finding in found.items()} == {"rope.offset": said}
