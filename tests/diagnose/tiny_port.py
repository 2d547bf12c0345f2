"""A small transformer written out by hand: the generator of true activations for the identifiers.

Every constant is an argument, so a test plants a fault by asking for another value in one `Port`. Nothing here
is shared with the package: formulas are written from the papers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.core.report import Finding
from parity_audit.core.types import Probe
from parity_audit.diagnose.evidence import Evidence, KnobFit
from parity_audit.diagnose.fit.causes import causes
from parity_audit.diagnose.fit.sides import sites_with_formula
from parity_audit.diagnose.fitting import causes_at
from parity_audit.diagnose.localise import component_of
from parity_audit.specs.schema import ResolvedKnob

DIMS = ("d_model", "n_heads", "n_kv_heads", "d_head", "d_mlp", "n_layers", "d_vocab")
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: x.clamp_min(0),
    "relu2": lambda x: x.clamp_min(0) ** 2,
}


def unscaled(inv_freq: Tensor) -> Tensor:
    """No RoPE scaling."""
    return inv_freq


@dataclass(frozen=True, kw_only=True)
class Port:
    """One implementation. A tuple is one value per layer; a single value holds everywhere."""

    d_model: int = 96
    n_heads: int = 4
    n_kv_heads: int = 2
    d_head: int = 32
    d_mlp: int = 64
    n_layers: int = 2
    d_vocab: int = 131
    seed: int = 0
    scale: object = 16.0
    cap: object = None
    clip: float | None = None
    window: object = None
    causal: bool = True
    see_padding: bool = False
    theta: object = 20000.0
    scaling: Callable[[Tensor], Tensor] = unscaled
    pairing: str = "half"
    d_rot: int | None = None
    offset_positions: int = 0
    count_padding: bool = False
    kv_map: tuple[int, ...] | None = None
    eps: float = 1e-5
    norm_offset: float = 1.0
    kind: str = "rms"
    act: object = "gelu_pytorch_tanh"
    swapped: bool = False
    embed_scale: float = 9.797959
    embed_std: float = 0.05
    logit_cap: float | None = None
    logit_clamp: float | None = None
    logit_scale: float = 1.0
    centred: bool = False
    score_std: float = 4.0
    stream: float = 1.0
    hide: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32

    def at(self, name: str, layer: int) -> object:
        value = getattr(self, name)
        return value[layer] if isinstance(value, tuple) else value

    def but(self, **changes: object) -> Port:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def weights_of(port: Port) -> dict[str, Tensor]:
    """The checkpoint: depends on sizes and seed only, so two ports with other constants share it."""
    g = torch.Generator().manual_seed(port.seed)

    def new(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=g) * std

    d, out = port.d_model, {}
    out["embed"] = new(port.d_vocab, d, std=port.embed_std)
    out["unembed"] = new(port.d_vocab, d, std=0.3) + 0.1
    out["norm.final"] = new(d, std=0.3)
    strong = port.score_std**0.5 / d**0.5 * 16**0.5 / port.d_head**0.25
    for layer in range(port.n_layers):
        for name in ("ln1", "ln2"):
            out[f"{layer}.norm.{name}"] = new(d, std=0.3)
        out[f"{layer}.q"] = new(port.n_heads, port.d_head, d, std=strong)
        out[f"{layer}.k"] = new(port.n_kv_heads, port.d_head, d, std=strong)
        out[f"{layer}.v"] = new(port.n_kv_heads, port.d_head, d, std=d**-0.5)
        out[f"{layer}.o"] = new(d, port.n_heads, port.d_head, std=(port.n_heads * port.d_head) ** -0.5)
        out[f"{layer}.mlp.gate"] = new(port.d_mlp, d, std=1.5 * d**-0.5)
        out[f"{layer}.mlp.up"] = new(port.d_mlp, d, std=d**-0.5)
        out[f"{layer}.down"] = new(d, port.d_mlp, std=port.d_mlp**-0.5)
    return out


def normed(x: Tensor, w: Tensor, port: Port) -> Tensor:
    if port.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + port.eps).sqrt() * (port.norm_offset + w)


def rotate(x: Tensor, position: Tensor, port: Port, layer: int) -> Tensor:
    """x [b p h d], position [b p]."""
    d_rot = port.d_head if port.d_rot is None else port.d_rot
    theta = float(port.at("theta", layer))  # type: ignore[arg-type]
    inv_freq = port.scaling(theta ** (-torch.arange(0, d_rot, 2, dtype=torch.float64) / d_rot)).float()
    angle = position[:, :, None].float() * inv_freq
    cos, sin = angle.cos()[:, :, None].to(x.dtype), angle.sin()[:, :, None].to(x.dtype)
    out = x.clone()
    if port.pairing == "half":
        a, b = x[..., : d_rot // 2], x[..., d_rot // 2 : d_rot]
        out[..., : d_rot // 2], out[..., d_rot // 2 : d_rot] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = x[..., 0:d_rot:2], x[..., 1:d_rot:2]
        out[..., 0:d_rot:2], out[..., 1:d_rot:2] = a * cos - b * sin, b * cos + a * sin
    return out


def visible(mask: Tensor, port: Port, layer: int) -> Tensor:
    n = mask.shape[1]
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    window = port.at("window", layer)
    see = (j <= i) if port.causal else torch.ones(n, n, dtype=torch.bool)
    see = see & (i - j < (window if window else n + 1))  # type: ignore[operator]
    see = see[None].expand(mask.shape[0], n, n)
    if not port.see_padding:
        see = see & mask[:, None]
    return see | torch.eye(n, dtype=torch.bool)


def run(port: Port, probes: tuple[Probe, ...]) -> dict[tuple[str, str], Tensor]:
    """Every site of every probe, computed in the port's dtype and handed over in float32."""
    w = {name: value.to(port.dtype) for name, value in weights_of(port).items()}
    out: dict[tuple[str, str], Tensor] = {}
    for probe in probes:

        def keep(site: str, x: Tensor, name: str = probe.name) -> Tensor:
            out[name, site] = x.float().clone()
            return x

        mask = torch.tensor(probe.mask).bool()
        position = (mask.long().cumsum(1) - 1).clamp_min(0) + port.offset_positions
        if port.count_padding:
            position = torch.arange(mask.shape[1])[None].expand_as(position)
        resid = keep("embed", w["embed"][torch.tensor(probe.token_ids)] * torch.tensor(port.embed_scale).to(port.dtype))
        for layer in range(port.n_layers):
            resid = _block(resid, w, port, layer, mask, position, keep, probe.sites == "all")
        final = keep("ln_final.out", normed(resid, w["norm.final"], port))
        unembed = w["unembed"] - w["unembed"].mean(0) if port.centred else w["unembed"]
        logits = final @ unembed.T * port.logit_scale
        logits = logits if port.logit_clamp is None else logits.clamp(-port.logit_clamp, port.logit_clamp)
        keep("logits", logits if port.logit_cap is None else port.logit_cap * torch.tanh(logits / port.logit_cap))
    return out


def _block(x: Tensor, w: dict[str, Tensor], port: Port, layer: int, mask: Tensor, position: Tensor,
           keep: Callable[..., Tensor], small: bool) -> Tensor:  # fmt: skip
    at = f"blocks.{layer}."
    keep(at + "resid_pre", x)
    normal = keep(at + "ln1.out", normed(x, w[f"{layer}.norm.ln1"], port))
    q, k, v = (keep(at + name, torch.einsum("bpd,hed->bphe", normal, w[f"{layer}.{name}"])) for name in "qkv")
    q, k, v = (t if port.clip is None else t.clamp(-port.clip, port.clip) for t in (q, k, v))
    q, k = (keep(f"{at}rot_{n}", rotate(t, position, port, layer)) for n, t in (("q", q), ("k", k)))
    default = tuple(h // (port.n_heads // port.n_kv_heads) for h in range(port.n_heads))
    kv_map = list(port.kv_map or default)
    z = _attend(q, k[:, :, kv_map], v[:, :, kv_map], visible(mask, port, layer), port, layer, keep if small else None)
    keep(at + "z", z)
    mid = keep(
        at + "resid_mid", port.stream * x + keep(at + "attn_out", torch.einsum("bphe,dhe->bpd", z, w[f"{layer}.o"]))
    )
    normal = keep(at + "ln2.out", normed(mid, w[f"{layer}.norm.ln2"], port))
    gate, up = normal @ w[f"{layer}.mlp.gate"].T, normal @ w[f"{layer}.mlp.up"].T
    keep(at + "mlp.pre", gate), keep(at + "mlp.pre_linear", up)
    act = ACTS[str(port.at("act", layer))]
    post = keep(at + "mlp.post", act(up) * gate if port.swapped else act(gate) * up)
    return keep(at + "resid_post", port.stream * mid + keep(at + "mlp_out", post @ w[f"{layer}.down"].T))


def _attend(q: Tensor, k: Tensor, v: Tensor, see: Tensor, port: Port, layer: int,
            keep: Callable[..., Tensor] | None) -> Tensor:  # fmt: skip
    at, cap = f"blocks.{layer}.", port.at("cap", layer)
    pieces = []
    for start in range(0, q.shape[1], 512):  # long probes: a few queries at a time
        # Rounded to the dtype once, after the division, as a fused kernel does: bf16 rounded before it would
        # swallow a divisor that is 0.1 % off altogether.
        wide = q.dtype if q.dtype != torch.bfloat16 else torch.float32
        scores = torch.einsum("bihe,bjhe->bhij", q[:, start : start + 512].to(wide), k.to(wide))
        scores = (scores / float(port.at("scale", layer))).to(q.dtype)  # type: ignore[arg-type]
        scores = scores if cap is None else cap * torch.tanh(scores / cap)  # type: ignore[operator]
        scores = scores.masked_fill(~see[:, None, start : start + 512], -torch.inf)
        pattern = torch.softmax(scores.float(), -1).to(q.dtype)
        if keep is not None:
            keep(at + "attn_scores", scores), keep(at + "pattern", pattern)
        pieces.append(torch.einsum("bhij,bjhe->bihe", pattern, v))
    return torch.cat(pieces, 1)


def probe(
    name: str, lengths: tuple[int, ...], *, pad: str = "right", d_vocab: int = 131, sites: str = "all", seed: int = 1
) -> Probe:
    """A batch of sequences of these lengths, token 1 first."""
    g, width = torch.Generator().manual_seed(seed), max(lengths)
    ids, masks = [], []
    for length in lengths:
        tokens, fill = [1, *torch.randint(2, d_vocab, (length - 1,), generator=g).tolist()], [0] * (width - length)
        ids.append(tuple(fill + tokens if pad == "left" else tokens + fill))
        ones = [1] * length
        masks.append(tuple(fill + ones if pad == "left" else ones + fill))
    return Probe(name=name, purpose="test", token_ids=tuple(ids), mask=tuple(masks), sites=sites)


PROBES = (probe("short", (40,)), probe("ragged", (30, 17, 7), seed=2), probe("left", (21, 9), pad="left", seed=3))


def spec_of(port: Port, **over: object) -> dict[str, ResolvedKnob]:
    """The spec that says what this port does."""
    windows = [layer for layer in range(port.n_layers) if port.at("window", layer)]
    size = port.at("window", windows[0]) if windows else None
    knobs = {
        "attention.scale": ResolvedKnob(value=port.at("scale", 0)), "attention.softcap": ResolvedKnob(value=port.at("cap", 0)),
        "attention.window": ResolvedKnob(value=size, layers=tuple(windows) if windows else None),
        "rope.theta": ResolvedKnob(value=port.at("theta", 0)), "rope.scaling": ResolvedKnob(value=None),
        "rope.pairing": ResolvedKnob(value=port.pairing), "norm.eps": ResolvedKnob(value=port.eps),
        "norm.offset": ResolvedKnob(value=port.norm_offset), "mlp.activation": ResolvedKnob(value=port.at("act", 0)),
        "embed.scale": ResolvedKnob(value=port.embed_scale), "logits.softcap": ResolvedKnob(value=port.logit_cap),
        "n_kv_heads": ResolvedKnob(value=port.n_kv_heads),
    }  # fmt: skip
    return knobs | {name.replace("__", "."): ResolvedKnob(value=value) for name, value in over.items()}


def evidence(port: Port, side: str = "candidate", *, knobs: dict[str, ResolvedKnob] | None = None,
             probes: tuple[Probe, ...] = PROBES) -> dict[int | None, Evidence]:  # fmt: skip
    """One Evidence per layer, and one for what lies outside the blocks."""
    tensors, weights = run(port, probes), weights_of(port)
    dims = {name: getattr(port, name) for name in DIMS}

    def of(layer: int | None) -> Evidence:
        at = "" if layer is None else f"blocks.{layer}."

        def tensor(name: str, site: str) -> Tensor | None:
            return None if site in port.hide else tensors.get((name, at + site))

        def weight(role: str) -> Tensor | None:
            return weights.get(role if layer is None else f"{layer}.{role}")

        return Evidence(side=side, layer=layer, dims=dims, knobs=knobs or spec_of(port), probes=probes,
                        tensor=tensor, weight=weight, dtype=str(port.dtype).removeprefix("torch."))  # fmt: skip

    return {layer: of(layer) for layer in (None, *range(port.n_layers))}


def found(candidate: Port, reference: Port, suspects: set[str] | None = None, *,
          probes: tuple[Probe, ...] = PROBES, **over: object) -> dict[str, Finding]:  # fmt: skip
    """The findings between two ports by knob; `over` changes what the spec says, `__` for dots."""
    knobs = spec_of(reference, **over)
    sides = [evidence(port, side, knobs=knobs, probes=probes)
             for port, side in ((candidate, "candidate"), (reference, "reference"))]  # fmt: skip
    wrong = [site for site in sites_with_formula(sides[0]) if suspects is None or component_of(site) in suspects]
    findings, _ = causes_at(sides[0], sides[1], wrong)
    assert len({finding.knob for finding in findings}) == len(findings), "one knob was reported twice"
    return {finding.knob: finding for finding in findings}


def departing(port: Port, *, probes: tuple[Probe, ...] = PROBES, **over: object) -> dict[object, KnobFit]:
    """What the formulas say of a port where it departs from its spec, by (knob, layer)."""
    side = evidence(port, knobs=spec_of(port, **over), probes=probes)
    return {(fit.knob, fit.layer): fit for fit in causes(side, side, None).candidate}
