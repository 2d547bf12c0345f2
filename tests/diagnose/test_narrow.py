"""A whole model in a narrow dtype: told from its residual stream, and from a model that merely holds narrow weights."""

import pytest
import torch
from held import Held, probe

from parity_audit.core.report import Finding
from parity_audit.diagnose.narrow import DTYPE, PRODUCTS, Narrow, dtype_finding, follows_from, narrow_dtype
from parity_audit.repair.choose import NO_SETTING
from parity_audit.repair.prove import wants_proof

SITES = ("embed", "blocks.0.resid_post", "blocks.1.resid_post")


def stream(*dtypes: torch.dtype, seed: int = 0) -> Held:
    """One tensor per site of `SITES`, rounded to its dtype."""
    draw = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(2, 5, 64, generator=draw).to(dtype).float() for dtype in dtypes)
    return Held(probe(batch=2, length=5), dict(zip(SITES, drawn, strict=True)))


FULL = stream(*[torch.float32] * 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_stream_that_a_narrow_dtype_holds_is_named_and_asks_for_no_proof(dtype: torch.dtype):
    name = str(dtype).removeprefix("torch.")
    finding = dtype_finding(stream(*[dtype] * 3), FULL, "float32")

    assert isinstance(finding, Finding)
    assert (finding.knob, finding.candidate_value, finding.reference_value) == (DTYPE, name, "float32")
    assert (finding.kind, finding.departs_from_spec) == ("settings", "candidate")
    assert "--dtype" in NO_SETTING[DTYPE]
    assert not wants_proof([finding], None)


@pytest.mark.parametrize(
    "candidate",
    [
        stream(torch.bfloat16, torch.float32, torch.float32),  # embeddings of a checkpoint in bfloat16
        stream(torch.bfloat16, torch.bfloat16, torch.float32),  # one block alone
        FULL,
    ],
)
def test_a_part_of_the_stream_is_not_the_whole_model(candidate: Held):
    assert narrow_dtype(candidate, FULL, "float32") is None


def test_an_audit_in_that_dtype_has_nothing_to_say():
    both = [stream(*[torch.bfloat16] * 3, seed=seed) for seed in (0, 1)]

    assert narrow_dtype(both[0], both[1], "float32") is None
    assert dtype_finding(both[0], FULL, "bfloat16") is None
    assert narrow_dtype(both[0], FULL, "bfloat16") is None


def test_a_candidate_that_shows_no_stream_is_not_accused():
    silent = Held(probe(batch=2, length=5), {"embed": torch.zeros(2, 5, 64)})

    assert narrow_dtype(silent, FULL, "float32") is None


def test_a_stream_of_zeros_on_both_sides_says_nothing():
    zeros = Held(probe(batch=2, length=5), {site: torch.zeros(2, 5, 64) for site in SITES})

    assert narrow_dtype(zeros, zeros, "float32") is None


def products(*narrow: str, names: tuple[str, ...] = PRODUCTS, seed: int = 0) -> Held:
    """Projections and the stream of two blocks, those of these names rounded to bfloat16."""
    draw = torch.Generator().manual_seed(seed)
    sites = {}
    for layer in (0, 1):
        for name in (*names, "resid_post"):
            value = torch.randn(2, 5, 64, generator=draw)
            sites[f"blocks.{layer}.{name}"] = value.bfloat16().float() if name in narrow else value
    return Held(probe(batch=2, length=5), sites)


def test_products_in_a_narrow_dtype_are_autocast():
    found = narrow_dtype(products(*PRODUCTS), products(), "float32")

    assert found == Narrow(dtype="bfloat16", throughout=False)
    finding = dtype_finding(products(*PRODUCTS), products(), "float32")
    assert finding is not None
    assert (finding.candidate_value, finding.evidence["throughout"]) == ("bfloat16 in products", False)


@pytest.mark.parametrize("narrow", [PRODUCTS[:3], PRODUCTS[3:], ("v",)])
def test_some_projections_are_rounded_by_a_fault_of_their_own(narrow: tuple[str, ...]):
    assert narrow_dtype(products(*narrow), products(), "float32") is None


@pytest.mark.parametrize(
    ("names", "enough"), [(("attn_proj", "mlp.pre"), False), (("v", "attn_proj", "mlp.pre"), True)]
)
def test_three_projections_in_sight_are_enough_and_two_are_not(names: tuple[str, ...], enough: bool):
    assert (narrow_dtype(products(*names, names=names), products(names=names), "float32") is not None) is enough


@pytest.mark.parametrize(
    ("knob", "value", "follows"),
    [
        ("attention.softmax_dtype", "bfloat16 scores", True),
        ("mlp.post.rounded", "bfloat16", True),
        ("weights.attn.q", "the checkpoint's rounded to bfloat16", True),
        ("attention.softmax_dtype", "float16 scores", False),
        ("rope.dtype", "bfloat16 cos and sin", True),
        ("rope.dtype", "bfloat16 frequencies", False),
        ("rope.dtype", "bfloat16 throughout", False),
        ("weights.attn.q", "the checkpoint's rounded to int8 by row", False),
        ("attention.scale", 9.5, False),
    ],
)
def test_a_component_that_rounds_as_the_whole_model_does_is_no_cause_of_its_own(
    knob: str, value: object, follows: bool
):
    finding = Finding(
        knob=knob, kind="variant", layers=None, site="logits", reference_value="full", candidate_value=value
    )

    assert follows_from(Narrow(dtype="bfloat16", throughout=False), finding) is follows
    assert not follows_from(None, finding)
