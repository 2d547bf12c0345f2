"""Projections and residual sums: what was done to a weight is read off input and output, and nothing where nothing was."""

from __future__ import annotations

import pytest
import torch
from loose import SHORT, differ, explained, loose

from parity_audit.diagnose.structure import projections
from parity_audit.diagnose.structure.sample import AS_STORED

D, HEADS, WIDTH, MLP = 64, 4, 16, 96
GENERATOR = torch.Generator().manual_seed(5)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


X = drawn(1, 48, D)
WEIGHTS = {
    "attn.q": drawn(D, D) / 8,
    "attn.o": drawn(D, D) / 8,
    "mlp.gate": drawn(MLP, D) / 8,
    "mlp.up": drawn(MLP, D) / 8,
}
BIAS = {"attn.q.bias": drawn(D)}


def eight_bits(w: torch.Tensor) -> torch.Tensor:
    return w.to(torch.float8_e4m3fn).float()


def scaled(w: torch.Tensor, largest: int, rounded, dim: int | None = None) -> torch.Tensor:
    """Weights in a format whose largest number is what the largest of a part becomes: of all weights, or along an axis."""
    top = w.abs().max() if dim is None else w.abs().amax(dim, keepdim=True)
    return rounded(w / top * largest) * top / largest


def block(weights: dict[str, torch.Tensor] | None = None, *, bias: torch.Tensor | None = None, q_times: float = 1.0):
    """One block's projections in float32, with other weights than the checkpoint's where given."""
    used = {**WEIGHTS, **(weights or {})}
    q = torch.nn.functional.linear(X, used["attn.q"], BIAS["attn.q.bias"] if bias is None else bias) * q_times
    sites = {
        "ln1.out": X, "q": q.unflatten(-1, (HEADS, WIDTH)), "z": X.unflatten(-1, (HEADS, WIDTH)),
        "attn_proj": X @ used["attn.o"].T, "ln2.out": X, "mlp.pre": X @ used["mlp.gate"].T,
        "mlp.pre_linear": X @ used["mlp.up"].T,
    }  # fmt: skip
    return loose(sites, weights={**WEIGHTS, **BIAS}, probes=SHORT[:1])


def found(candidate) -> dict[str, object]:
    return {knob: finding.candidate_value for knob, finding in differ(candidate, block()).items()}


def test_a_clean_block_has_no_finding():
    assert found(block()) == {}
    read = projections.read(block()[0])
    assert {fit.value for fit in read if not fit.knob.endswith("scale")} == {AS_STORED}


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (lambda w: w.T.contiguous(), "transposed"),
        (lambda w: w.roll(WIDTH, 0), "heads permuted: [3, 0, 1, 2]"),
        (lambda w: w.view(HEADS, 2, 8, D).transpose(1, 2).reshape(D, D), "rows of each head interleaved (half to adjacent pairs)"),
        (lambda w: w.bfloat16().float(), "the checkpoint's rounded to bfloat16"),
        (lambda w: w.half().float(), "the checkpoint's rounded to float16"),
        (lambda w: scaled(w, 127, torch.round), "the checkpoint's rounded to int8 by tensor"),
        (lambda w: scaled(w, 127, torch.round, dim=1), "the checkpoint's rounded to int8 by row"),
        (lambda w: scaled(w, 448, eight_bits), "the checkpoint's rounded to float8_e4m3fn by tensor"),
        (lambda w: scaled(w, 448, eight_bits, dim=1), "the checkpoint's rounded to float8_e4m3fn by row"),
        (eight_bits, "the checkpoint's rounded to float8_e4m3fn"),
        (lambda w: scaled(w.view(D, 2, 32), 7, torch.round, dim=2).view(D, D), "the checkpoint's rounded to int4 in blocks of 32"),
        (lambda w: w + 1, "the checkpoint's plus 1"),
        (lambda w: w + 0.1 * drawn(D, D), "not the checkpoint's"),
    ],
)  # fmt: skip
def test_what_was_done_to_a_weight(what, says):
    assert found(block({"attn.q": what(WEIGHTS["attn.q"])})) == {"weights.attn.q": says}


def inputs_rounded(weight: torch.Tensor):
    """The projection q of an input in bfloat16."""
    clean = block()[0]
    sites = {site: clean.tensor("short", site) for site in ("ln1.out", "z", "attn_proj")}
    q = torch.nn.functional.linear(X.bfloat16().float(), weight, BIAS["attn.q.bias"]).unflatten(-1, (HEADS, WIDTH))
    return loose({**sites, "q": q}, weights={**WEIGHTS, **BIAS}, probes=SHORT[:1])


def test_inputs_in_a_narrow_dtype_are_not_other_weights():
    weight = WEIGHTS["attn.q"]

    assert found(inputs_rounded(weight)) == {"weights.attn.q": "the checkpoint's, times inputs rounded to bfloat16"}
    assert found(inputs_rounded(weight.bfloat16().float())) == {
        "weights.attn.q": "the checkpoint's rounded to bfloat16, as are the inputs"
    }


def test_a_product_of_another_site_is_that():
    clean = block()[0]
    sites = {site: clean.tensor("short", site) for site in ("ln1.out", "z", "attn_proj")}
    stream = drawn(1, 48, D)
    q = torch.nn.functional.linear(stream, WEIGHTS["attn.q"], BIAS["attn.q.bias"]).unflatten(-1, (HEADS, WIDTH))
    candidate = loose({**sites, "resid_pre": stream, "q": q}, weights={**WEIGHTS, **BIAS}, probes=SHORT[:1])

    assert found(candidate) == {"weights.attn.q": "the checkpoint's, of resid_pre"}


def test_only_the_wrong_outputs_are_named():
    other = WEIGHTS["attn.o"].clone()
    other[5:9] = drawn(4, D)

    finding = differ(block({"attn.o": other}), block())["weights.attn.o"]

    assert finding.kind == "weights"
    assert "outputs 5-8" in finding.evidence["candidate"][0]["differs"]


@pytest.mark.parametrize(
    ("factors", "says"),
    [
        ({5: 3.0, 6: 3.0, 9: 3.0}, "rows 5-6, 9 times 3"),
        (dict.fromkeys(range(32), 0.0), "rows 0-31 times 0"),
        ({0: 0.5, 63: 2.0}, "rows 0, 63 times 0.5 to 2"),
        ({7: 1.004}, "rows 7 times 1.004"),
    ],
)
def test_rows_with_a_factor_of_their_own(factors, says):
    other = WEIGHTS["attn.o"].clone()
    for row, factor in factors.items():
        other[row] *= factor

    assert found(block({"attn.o": other})) == {"weights.attn.o": says}


def test_a_factor_is_read_to_six_digits():
    assert found(block({"attn.o": WEIGHTS["attn.o"] * 1.07})) == {"weights.attn.o.scale": pytest.approx(1.07, rel=1e-6)}
    assert found(block(q_times=0.9)) == {"weights.attn.q.scale": pytest.approx(0.9, rel=1e-6)}


def test_one_head_is_gone():
    other = WEIGHTS["attn.q"].clone()
    other[16:32] = 0
    bias = BIAS["attn.q.bias"].clone()
    bias[16:32] = 0

    assert found(block({"attn.q": other}, bias=bias)) == {"weights.attn.q": "heads scaled: {1: 0.0}"}


@pytest.mark.parametrize(("factor", "says"), [(0.0, "missing"), (2.0, "the checkpoint's times 2")])
def test_a_bias_is_missing_or_doubled(factor, says):
    assert found(block(bias=BIAS["attn.q.bias"] * factor)) == {"attention.q_bias": says}


def test_a_bias_nobody_stored():
    candidate = block()
    extra = drawn(D)
    shifted = loose(
        {
            **{site: candidate[0].tensor("short", site) for site in ("ln1.out", "q", "z")},
            "attn_proj": X @ WEIGHTS["attn.o"].T + extra,
        },
        weights={**WEIGHTS, **BIAS}, probes=SHORT[:1],
    )  # fmt: skip

    assert found(shifted) == {"attention.o_bias": "one that the checkpoint does not have"}


def test_gate_and_up_changed_places():
    says = found(block({"mlp.gate": WEIGHTS["mlp.up"], "mlp.up": WEIGHTS["mlp.gate"]}))

    assert says == {"weights.mlp.gate": "those of mlp.up", "weights.mlp.up": "those of mlp.gate"}


def stream(*, attn: float = 1.0, mlp: float = 1.0, reads: str = "resid_mid"):
    """The sums of one block, and a norm that reads one of its streams."""
    pre, attn_out, mlp_out = drawn(1, 48, D), drawn(1, 48, D), drawn(1, 48, D)
    mid = pre + attn * attn_out
    norm = torch.rand(D, generator=GENERATOR) + 0.5
    read_by_norm = {"resid_pre": pre, "resid_mid": mid}[reads]
    out = norm * read_by_norm / read_by_norm.square().mean(-1, keepdim=True).sqrt()
    sites = {"resid_pre": pre, "attn_out": attn_out, "resid_mid": mid, "mlp_out": mlp_out, "ln2.out": out,
             "resid_post": mid + mlp * mlp_out}  # fmt: skip
    return loose(sites, weights={"norm.ln2": norm}, probes=SHORT[:1], norm__eps=1e-14)


def test_residual_sums():
    wrong = explained(stream(attn=0.22, mlp=0.5), stream())

    assert {knob: item.candidate_value for knob, item in wrong.items()} == {
        "residual.attn_out": pytest.approx(0.22, rel=1e-6), "residual.mlp_out": pytest.approx(0.5, rel=1e-6),
    }  # fmt: skip
    assert explained(stream(), stream()) == {}


@pytest.mark.parametrize(("added", "says"), [(1.0, {"residual.parallel": True}), (0.0, {"residual.attn_out": 0.0})])
def test_a_stream_before_attention_shown_as_resid_mid_is_told_from_attention_that_is_lost(added, says):
    side = stream()
    clean = side[0]
    part = {name: clean.tensor("short", name) for name in ("resid_pre", "attn_out", "mlp_out")}
    out = clean.weight("norm.ln2") * torch.nn.functional.rms_norm(part["resid_pre"], (D,), eps=0.0)
    after = part["resid_pre"] + added * part["attn_out"] + part["mlp_out"]
    sites = {**part, "resid_mid": part["resid_pre"], "ln2.out": out, "resid_post": after}
    shown = loose(sites, weights={"norm.ln2": clean.weight("norm.ln2")}, probes=SHORT[:1], norm__eps=1e-14)

    findings = explained(shown, side)

    assert {knob: finding.candidate_value for knob, finding in findings.items()} == says


def test_what_a_block_without_resid_mid_reads_is_told_from_its_sum():
    def hidden(reads):
        whole = stream(reads=reads)[0]
        names = ("resid_pre", "attn_out", "mlp_out", "ln2.out", "resid_post")
        weights = {"norm.ln2": whole.weight("norm.ln2")}
        sites = {name: whole.tensor("short", name) for name in names if reads == "resid_mid" or name != "resid_post"}
        return loose(sites, weights=weights, probes=SHORT[:1], norm__eps=1e-14)

    (finding,) = explained(hidden("resid_pre"), hidden("resid_mid")).values()
    assert (finding.knob, finding.candidate_value) == ("residual.parallel", True)
    assert explained(hidden("resid_mid"), hidden("resid_mid")) == {}


def test_a_multiplier_of_the_architecture_is_read_off_the_sums():
    """What is shown of the sublayers is behind the spec's multiplier, whatever the program multiplies by."""
    pre, proj, mlp = drawn(1, 48, D), drawn(1, 48, D), drawn(1, 48, D)

    def side(times):
        sites = {"resid_pre": pre, "attn_proj": proj, "attn_out": 0.22 * proj, "resid_mid": pre + times * proj,
                 "mlp_proj": mlp, "mlp_out": 0.22 * mlp, "resid_post": pre + times * proj + times * mlp}  # fmt: skip
        return loose(sites, probes=SHORT[:1], residual__scale=0.22)

    findings = explained(side(1.5), side(0.22))

    assert {knob: item.candidate_value for knob, item in findings.items()} == {
        "residual.scale": pytest.approx(1.5, rel=1e-6)
    }
    assert explained(side(0.22), side(0.22)) == {}


@pytest.mark.parametrize("reads", ["parallel", "sequential"])
def test_one_norm_for_both_sublayers(reads):
    pre, attn_out = drawn(1, 48, D), drawn(1, 48, D)
    gain, gate = torch.rand(D, generator=GENERATOR) + 0.5, drawn(MLP, D) / 8

    def normed(x):
        return gain * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def side(reads):
        x = normed(pre) if reads == "parallel" else normed(pre + attn_out)
        sites = {"resid_pre": pre, "attn_out": attn_out, "ln1.out": normed(pre), "mlp.pre": x @ gate.T}
        return loose(
            sites,
            weights={"norm.ln1": gain, "mlp.gate": gate, "mlp.up": gate},
            probes=SHORT[:1],
            norm__eps=1e-5,
            norm__kind="rms",
            residual__parallel=True,
        )

    expected = {} if reads == "parallel" else {"residual.parallel": False}
    assert {knob: item.candidate_value for knob, item in explained(side(reads), side("parallel")).items()} == expected


def test_a_fused_tensor_cut_apart_in_another_way():
    fused = torch.cat([WEIGHTS["mlp.gate"], WEIGHTS["mlp.up"]])
    interleaved = fused.view(2, MLP, D).transpose(0, 1).reshape(2 * MLP, D)
    findings = found(block({"mlp.gate": interleaved[:MLP], "mlp.up": interleaved[MLP:]}))

    assert findings == dict.fromkeys(("weights.mlp.gate", "weights.mlp.up"), "rows of mlp.gate and mlp.up, mixed")


def normed_heads(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.view(1, -1, HEADS, WIDTH), (WIDTH,)).flatten(2)


@pytest.mark.parametrize(
    ("what", "square", "wide"),
    [
        (torch.nn.functional.silu, "curve silu", "curve silu"),
        (lambda x: x.view(1, -1, HEADS, WIDTH).flip(2).flatten(2), "order heads reversed", "order heads reversed"),
        (normed_heads, "norm each head normalised to rms 1", None),
        (lambda x: torch.where(x > 0.3, x + drawn(1, 48, D), x), None, None),
    ],
)
def test_a_projection_of_something_else(what, square, wide):
    """A square weight is gone through backwards; with fewer outputs than inputs things are tried, and not all can be."""
    for outputs, words in ((D, square), (40, wide)):
        weight = WEIGHTS["attn.o"][:outputs]
        z = dict.fromkeys(("z", "q"), X.unflatten(-1, (HEADS, WIDTH)))
        sides = [
            loose({**z, "attn_proj": x @ weight.T}, weights={"attn.o": weight}, probes=SHORT[:1]) for x in (what(X), X)
        ]
        said = f"the checkpoint's, of inputs with {words}" if words else "not the checkpoint's"

        assert differ(*sides)["weights.attn.o"].candidate_value == said


def test_a_factor_is_told_from_a_bias_where_a_strong_sink_makes_tokens_alike():
    """One vector explains as much as one factor there: the factor is the smaller freedom."""
    alike = X[:, :1] + 1e-5 * X

    def attended(times: float):
        sites = {"z": alike.unflatten(-1, (HEADS, WIDTH)), "attn_proj": times * (alike @ WEIGHTS["attn.o"].T)}
        return loose(sites, weights=WEIGHTS, probes=SHORT[:1])

    said = {knob: finding.candidate_value for knob, finding in differ(attended(0.8), attended(1.0)).items()}

    assert said == {"weights.attn.o.scale": pytest.approx(0.8, rel=1e-5)}


@pytest.mark.parametrize(("share", "claimed"), [(0.03, True), (0.3, False)])
def test_a_cause_that_leaves_much_of_the_output_is_not_claimed(share, claimed):
    """Factors for rows take away more than four fifths of the difference in both cases."""
    exact = X @ (WEIGHTS["attn.o"] * torch.linspace(0.05, 0.2, D)[:, None]).T
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(9))
    made = exact + share * exact.square().mean().sqrt() * noise
    candidate = loose(
        {"z": X.unflatten(-1, (HEADS, WIDTH)), "attn_proj": made}, weights={**WEIGHTS, **BIAS}, probes=SHORT[:1]
    )
    said = str(found(candidate)["weights.attn.o"])

    assert said.startswith("rows ") if claimed else said == "not the checkpoint's"
