"""Values that attention averaged, found back from pattern and z: planted in float32, described as they were planted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_port import probe

from parity_audit.diagnose.describe import better_description
from parity_audit.diagnose.forms.attended import attended, averaged, solved
from parity_audit.diagnose.forms.described import described
from parity_audit.diagnose.forms.pair import Description

POS, HEADS, KV, WIDTH = 48, 4, 2, 16


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotated, halves together, theta 10000: `[b pos head d_head]`."""
    angle = torch.arange(POS)[:, None] * 10000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = (f(angle).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


V, K = drawn(1, POS, KV, WIDTH), drawn(1, POS, KV, WIDTH, seed=1)
SCORES = drawn(1, HEADS, POS, POS, seed=2).masked_fill(torch.ones(POS, POS).triu(1).bool(), -torch.inf)
PATTERN = SCORES.softmax(-1)


class Held:
    """One short probe's tensors, as a capture hands them out."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.held = {f"blocks.0.{site}": value for site, value in tensors.items()}
        self.probes = (probe("short", (POS,)),)

    def sites(self, name: str) -> set[str]:
        return set(self.held)

    def tensor(self, name: str, site: str) -> torch.Tensor:
        return self.held[site]


def capture(values: torch.Tensor, *, pattern: bool = True) -> Held:
    z = torch.einsum("bhqk,bkhd->bqhd", PATTERN, values.repeat_interleave(HEADS // KV, 2))
    sites = {"v": V, "k": K, "rot_k": turned(K), "z": z}
    return Held({**sites, "pattern": PATTERN} if pattern else sites)


CHANGES = [
    ("rounded", "float8_e4m3fn", lambda v: v.to(torch.float8_e4m3fn).float()),
    ("norm", "each head normalised to rms 1", lambda v: torch.nn.functional.rms_norm(v, v.shape[-1:])),
    ("source", "equal to v turned as keys are (half)", turned),
    ("source", "equal to rot_k", lambda v: turned(K)),
    ("scale", pytest.approx(0.7, rel=1e-5), lambda v: 0.7 * v),
    ("curve", "silu", torch.nn.functional.silu),
]


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize(("kind", "value", "change"), CHANGES)
def test_what_became_of_the_values(kind, value, change, shown):
    own, true = capture(change(V), pattern=shown), capture(V)
    found = described(attended("blocks.0.z", own, true, WIDTH))

    assert (found.kind, found.value) == (kind, value)


def test_values_that_are_right_have_no_form():
    assert described(attended("blocks.0.z", capture(V), capture(V), WIDTH)) is None


def test_other_values_stay_unexplained():
    assert described(attended("blocks.0.z", capture(drawn(*V.shape, seed=9)), capture(V), WIDTH)) is None


def test_a_token_that_hardly_sees_itself_is_left_out():
    pattern = torch.eye(4, dtype=torch.float64).repeat(1, 1, 1)
    pattern[0, 2] = torch.tensor([0.5, 0.5 - 1e-9, 1e-9, 0.0])
    values = drawn(4, 1, WIDTH).double()
    found, sure = solved(pattern, torch.einsum("hqk,khd->qhd", pattern, values), values)

    assert sure.tolist() == [True, True, False, True]
    assert torch.allclose(found[sure], values[sure])


def test_nothing_to_be_had_is_none():
    own = Held({"v": V, "z": V})
    assert attended("blocks.0.z", own, own, WIDTH) is None


def test_what_was_done_to_values_is_said_where_it_leaves_clearly_less():
    outputs = Description(kind="norm", value="per token", usual="as computed", share_left=3e-3)
    values = Description(kind="values.norm", value="to rms 1", usual="as computed", share_left=1e-6)

    assert better_description(outputs, values) is values
    assert better_description(None, outputs) is outputs
    assert better_description(replace(outputs, share_left=2e-6), values).kind == "norm"


def with_a_sink(values: torch.Tensor, noise: float = 0.0) -> Held:
    """Attention of which nearly all goes to the first token: its pattern cannot be inverted without magnifying rounding."""
    scores = SCORES.clone()
    scores[..., 0] += 14.0
    pattern = scores.softmax(-1)
    z = torch.einsum("bhqk,bkhd->bqhd", pattern, values.repeat_interleave(HEADS // KV, 2))
    return Held({"v": V, "z": z + noise * drawn(*z.shape, seed=5), "pattern": pattern})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_rounded_values_behind_an_attention_sink(dtype: torch.dtype):
    own, true = with_a_sink(V.to(dtype).float()), with_a_sink(V)
    values = attended("blocks.0.z", own, true, WIDTH)
    found = averaged("blocks.0.z", own, true)

    assert values is None or described(values) is None, (
        "the inverse of the pattern would do, and nothing else is needed"
    )
    assert (found.kind, found.value, found.usual) == ("rounded", str(dtype).removeprefix("torch."), "full")


@pytest.mark.parametrize("step", [1, -2])
@pytest.mark.parametrize("first", [0.0, 3.0])
def test_values_of_other_tokens_behind_an_attention_sink(step: int, first: float):
    """A cache that is one token late holds anything in its first place."""
    moved = V.roll(step, 1)
    moved[:, slice(None, step) if step > 0 else slice(step, None)] = first

    found = averaged("blocks.0.z", with_a_sink(moved), with_a_sink(V))

    assert (found.kind, found.value) == ("position", "those of 1 before" if step == 1 else "those of 2 after")


@pytest.mark.parametrize("own", [with_a_sink(V), with_a_sink(V, noise=1e-2), with_a_sink(1.02 * V)])
def test_what_is_no_rounding_of_the_values_is_not_called_so(own: Held):
    assert averaged("blocks.0.z", own, with_a_sink(V)) is None
