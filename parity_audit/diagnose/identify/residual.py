"""The residual stream: what is added to it, how much of it, and which stream the MLP reads.

- residual.attn_out, residual.mlp_out: b in resid_after = resid_before + b * sublayer_out (least squares);
- residual.scale: c in what is added = c * what the output projection made, where no norm is between; where the
  architecture has such a multiplier (granite) c is read off the sums themselves;
- residual.parallel: ln2.out, its weight divided out, is parallel to the stream that ln2 read: resid_mid in a sequential
  block, resid_pre in a parallel one; or what a block shows as resid_mid is resid_pre, and both sublayers are added to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, relative_rms, tokens_of
from parity_audit.formulas.norms import normed

EXPLAINED = 1e-3
PARALLEL = 0.9999


def fit(evidence: Evidence) -> list[Outcome]:
    """Coefficients of the sums of one block, and what its second norm reads."""
    if evidence.layer is None:
        return []
    sums = [
        ("residual.attn_out", "resid_mid", "resid_pre", "attn_out"),
        ("residual.mlp_out", "resid_post", "resid_mid", "mlp_out"),
    ]
    found: list[KnobFit | None] = []
    if "residual.scale" in evidence.knobs:  # what is added is the product; hooks on the way show it before or after
        whole = [("resid_mid", "resid_pre", "attn_proj"), ("resid_post", "resid_mid", "mlp_proj")]
        found = [_added(evidence, "residual.scale", *names) for names in whole]
    if any(found):
        return [outcome for outcome in [*found, _read(evidence)] if outcome is not None]
    early = _parallel_by_sums(evidence)
    found = [early] if early is not None else [_added(evidence, *names) for names in sums]
    found += [_share(evidence, "attn_out", "attn_proj", "norm.ln1_post")]
    found += [_share(evidence, "mlp_out", "mlp_proj", "norm.ln2_post")]
    return [outcome for outcome in [*found, None if early is not None else _read(evidence)] if outcome is not None]


def _parallel_by_sums(evidence: Evidence) -> KnobFit | None:
    """A block that shows as resid_mid the stream before attention, because that is what its second norm reads, and adds
    both sublayers to it behind: resid_mid = resid_pre, resid_post = resid_pre + attn_out + mlp_out."""
    sites = tokens_of(evidence, "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
    if sites is None or evidence.weight("norm.ln2") is None:
        return None
    before, middle, after, attention, mlp = sites
    left = relative_rms(after - before - attention - mlp, after)
    if not torch.equal(before, middle) or left > EXPLAINED * relative_rms(attention, after):
        return None
    return KnobFit(
        knob="residual.parallel", layer=evidence.layer, value="parallel", stderr=None, residual=left, n=len(before),
        site="ln2.out",
    )  # fmt: skip


def _slope(evidence: Evidence, knob: str, site: str, x: Tensor, y: Tensor) -> KnobFit | None:
    """y = b x, None where that is not what happens."""
    if float(x.norm()) == 0.0:
        return None
    b = float((x * y).sum() / x.square().sum())
    left = relative_rms(y - b * x, y)
    if left > EXPLAINED:
        return None
    stderr = max(left * abs(b) / max(x.numel(), 1) ** 0.5, 1e-9)
    return KnobFit(knob=knob, layer=evidence.layer, value=b, stderr=stderr, residual=left, n=x.numel(), site=site)


def _added(evidence: Evidence, knob: str, after: str, before: str, out: str) -> KnobFit | None:
    sites = tokens_of(evidence, after, before, out)
    return None if sites is None else _slope(evidence, knob, after, sites[2], sites[0] - sites[1])


def _share(evidence: Evidence, added: str, made: str, norm: str) -> KnobFit | None:
    sites = None if evidence.weight(norm) is not None else tokens_of(evidence, added, made)
    return None if sites is None else _slope(evidence, "residual.scale", added, sites[1], sites[0])


def _read(evidence: Evidence) -> KnobFit | None:
    """Which stream the second norm reads; None where neither fits."""
    weight = evidence.weight("norm.ln2")
    sites = tokens_of(evidence, "ln2.out", "resid_mid", "resid_pre")
    if sites is None and (parts := tokens_of(evidence, "ln2.out", "resid_pre", "attn_out")) is not None:
        sites = [parts[0], parts[1] + parts[2], parts[1]]  # a parallel block shows no resid_mid
    if weight is None:
        return _read_by_mlp(evidence)
    if sites is None:
        return None
    gain = f64(weight) + evidence.spec_number("norm.offset", 0.0)
    bias = evidence.weight("norm.ln2.bias")
    out = sites[0] if bias is None else sites[0] - f64(bias)
    direction = out / torch.where(gain.abs() > 1e-3, gain, torch.inf)
    keep = (gain.abs() > 1e-3).double()
    likeness = {
        name: max(
            _cosine(direction, stream * keep), _cosine(direction, (stream - stream.mean(-1, keepdim=True)) * keep)
        )
        for name, stream in (("sequential", sites[1]), ("parallel", sites[2]))
    }
    best = max(likeness, key=lambda name: likeness[name])
    if likeness[best] < PARALLEL:
        return None
    value: KnobValue = best
    return KnobFit(
        knob="residual.parallel", layer=evidence.layer, value=value, stderr=None, residual=1 - likeness[best],
        n=len(out), site="ln2.out",
    )  # fmt: skip


def _read_by_mlp(evidence: Evidence) -> KnobFit | None:
    """A block with one norm for both sublayers: the MLP's first product is of the norm's output, or of the norm of the
    stream after attention, made again with the checkpoint's weight."""
    role = "mlp.gate" if evidence.weight("mlp.gate") is not None else "mlp.up"
    product, norm = evidence.weight(role), evidence.weight("norm.ln1")
    sites = tokens_of(evidence, "mlp.pre", "ln1.out", "resid_pre", "attn_out")
    if sites is None or product is None or norm is None or product.ndim != 2:
        return None
    made, once, stream = sites[0].flatten(1), sites[1], sites[2] + sites[3]
    bias, shift = evidence.weight(f"{role}.bias"), evidence.weight("norm.ln1.bias")
    unit = normed(stream, str(evidence.spec_value("norm.kind")), evidence.spec_number("norm.eps", 0.0))
    again = unit * (f64(norm) + evidence.spec_number("norm.offset", 0.0)) + (0.0 if shift is None else f64(shift))
    left = {
        name: relative_rms(x @ f64(product).T + (0.0 if bias is None else f64(bias)) - made, made)
        for name, x in (("parallel", once), ("sequential", again))
    }
    best = min(left, key=lambda name: left[name])
    if left[best] > EXPLAINED:
        return None
    return KnobFit(
        knob="residual.parallel", layer=evidence.layer, value=best, stderr=None, residual=left[best], n=len(made),
        site="mlp.pre",
    )  # fmt: skip


def _cosine(a: Tensor, b: Tensor) -> float:
    """Mean cosine over tokens."""
    return float(torch.nn.functional.cosine_similarity(a, b, dim=-1).mean())
