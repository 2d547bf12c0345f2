"""Seeded checkpoints with an architecture's real constants: `mini` (~1M parameters), `small` (~150M), `full` (real sizes).

Laid out as a hub cache under the real repository id, so that every backend loads them by name through its
ordinary code path with the hub offline. Only sizes are replaced. The weights are drawn so that nothing hides:
norm weights are random, scores reach the order of the soft-cap, inputs of some norms are small enough for
eps to matter, token norms differ, and grouped heads are really grouped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from math import prod, sqrt
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from safetensors.torch import save_file
from torch import Tensor

from parity_audit.core.errors import UsageError
from parity_audit.core.types import Checkpoint
from parity_audit.specs.resolve import ResolvedModel
from parity_audit.specs.rope import default_table
from parity_audit.specs.tokenizer import BOS, EOS, PAD, write_tokenizer
from parity_audit.specs.view import dims

SIZES = ("mini", "small", "full")
MARKER = "parity_audit_synthetic.json"
RECIPE = 4
SLOW_ENOUGH = 0.02  # radians per position
SHARD_BYTES = 4 << 30

DEFAULT_SCALES = {
    "embed": 0.05,        # rms of a token's embedding before its own factor
    "embed_spread": 0.3,  # log-normal spread of token norms, so that eps shows as a bend and not as a scale
    "qk": 1.1,            # rms of queries and keys: scores then have a standard deviation of its square
    "v": 1.0,
    "o": 0.3,             # rms of what a sublayer adds
    "mlp_pre": 1.5,
    "mlp_out": 0.3,
    "norm_mean": 1.0,
    "norm_spread": 0.25,
    "final_norm_mean": 0.3,
    "post_norm_mean": 1.0,
}  # fmt: skip


def make(model: ResolvedModel, *, size: str = "mini", seed: int = 0, root: Path) -> Checkpoint:
    """The checkpoint of a model in one size; made once per size, seed and recipe.

    Raises:
        UsageError: not a size, or the spec has no sizes of that name.
    """
    config = _config(model, size)
    scales = {**DEFAULT_SCALES, **model.spec.content.weight_scales}
    key = hashlib.sha256(
        json.dumps([RECIPE, config, scales, seed, model.repo_id], sort_keys=True).encode()
    ).hexdigest()[:16]
    home = root / f"{model.repo_id.replace('/', '--')}-{size}-{seed}-{key}"
    snapshot = home / "hub" / f"models--{model.repo_id.replace('/', '--')}" / "snapshots" / key
    if not home.is_dir():
        _write(home, snapshot, model, config, scales, size, seed)
    return Checkpoint(
        repo_id=model.repo_id, path=str(snapshot), hf_home=str(home), synthetic=size, fingerprint=f"synthetic-{key}"
    )


def _config(model: ResolvedModel, size: str) -> dict[str, Any]:
    """The released config with its sizes replaced, and the tiny tokenizer's special ids."""
    known = model.spec.content.miniature
    if size not in SIZES or (size != "full" and size not in known):
        raise UsageError(
            f"`{size}` is not a size of a synthetic checkpoint", code="unknown-size", expected=", ".join(SIZES)
        )
    config = {**model.config, "torch_dtype": "float32"}
    if size == "full":
        return config
    return {**config, **known[size], "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


def _write(
    home: Path,
    snapshot: Path,
    model: ResolvedModel,
    config: dict[str, Any],
    scales: dict[str, float],
    size: str,
    seed: int,
) -> None:
    """Build beside the final place and rename, so that a checkpoint that exists is whole."""
    home.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=home.parent, prefix=".making-"))
    try:
        folder = staging / snapshot.relative_to(home)
        folder.mkdir(parents=True)
        sizes = dims(model.spec, config)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        (folder / MARKER).write_text(json.dumps({"size": size, "seed": seed, "sizes_only": sorted(sizes)}))
        write_tokenizer(folder, min(sizes["d_vocab"], 512))
        _write_shards(folder, _weights(model, config, sizes, scales, seed))
        refs = folder.parents[1] / "refs"
        refs.mkdir()
        (refs / "main").write_text(snapshot.name)
        os.replace(staging, home)
    except OSError:
        if not home.is_dir():
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_shards(folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
    """One file, or numbered shards with an index where one would be too large."""
    shards: list[dict[str, Tensor]] = [{}]
    files: dict[str, int] = {}
    held = total = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if held and held + size > SHARD_BYTES:
            _save(folder, len(shards), shards[-1])
            shards.append({})
            shards[-2].clear()
            held = 0
        shards[-1][name] = tensor
        files[name] = len(shards)
        held, total = held + size, total + size
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    _save(folder, len(shards), shards[-1])
    index = {"metadata": {"total_size": total}, "weight_map": {name: _shard(number) for name, number in files.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _shard(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _save(folder: Path, number: int, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / _shard(number), metadata={"format": "pt"})


def _weights(
    model: ResolvedModel, config: dict[str, Any], sizes: dict[str, int], scales: dict[str, float], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint by its transformers name, in float32."""
    for name, shape in _shapes(model, config, sizes):
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        yield name, _draw(name, shape, sizes, scales, model, generator).contiguous()


def _shapes(
    model: ResolvedModel, config: dict[str, Any], sizes: dict[str, int]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    d_model, d_mlp = sizes["d_model"], sizes["d_mlp"]
    queries, keys = sizes["n_heads"] * sizes["d_head"], sizes["n_kv_heads"] * sizes["d_head"]
    yield "model.embed_tokens.weight", (sizes["d_vocab"], d_model)
    norms = sorted({name for role, name in model.spec.content.roles.items() if role.startswith("norm.ln")} | {
        "model.layers.{l}.post_attention_layernorm.weight"
    })  # fmt: skip
    for layer in range(sizes["n_layers"]):
        block = f"model.layers.{layer}"
        for norm in norms:
            yield norm.replace("{l}", str(layer)), (d_model,)
        yield f"{block}.self_attn.q_proj.weight", (queries, d_model)
        yield f"{block}.self_attn.k_proj.weight", (keys, d_model)
        yield f"{block}.self_attn.v_proj.weight", (keys, d_model)
        yield f"{block}.self_attn.o_proj.weight", (d_model, queries)
        yield f"{block}.mlp.gate_proj.weight", (d_mlp, d_model)
        yield f"{block}.mlp.up_proj.weight", (d_mlp, d_model)
        yield f"{block}.mlp.down_proj.weight", (d_model, d_mlp)
    yield "model.norm.weight", (d_model,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (sizes["d_vocab"], d_model)


def _draw(
    name: str, shape: tuple[int, ...], sizes: dict[str, int], scales: dict[str, float], model: ResolvedModel,
    generator: torch.Generator,
) -> Tensor:  # fmt: skip
    noise = torch.randn(shape, generator=generator)
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        factors = (scales["embed_spread"] * torch.randn(shape[0], 1, generator=generator)).exp()
        return noise * factors * scales["embed"]
    if len(shape) == 1:
        offset = float(model.spec.content.knobs["norm.offset"].value)  # type: ignore[union-attr]
        return noise * scales["norm_spread"] + _norm_mean(name, scales, model) - offset
    weight = noise * (_output_rms(name, scales) / sqrt(prod(shape[1:])))
    return _tapered(weight, model, sizes) if "q_proj" in name or "k_proj" in name else weight


def _tapered(weight: Tensor, model: ResolvedModel, sizes: dict[str, int]) -> Tensor:
    """Query or key rows `[(head d_head), d_model]` with less energy in the fast rotary pairs.

    Float32 angles are off by position times frequency times eps, so at thousands of positions the fastest
    pairs would bury everything else in rounding. Trained models lean on slow pairs there too.
    """
    theta = float(model.config.get("rope_theta") or 10000.0)
    frequencies = torch.tensor(default_table(theta, sizes["d_head"]))
    amplitude = (SLOW_ENOUGH / frequencies).clamp(max=1.0).sqrt().repeat(2)
    amplitude = amplitude / amplitude.square().mean().sqrt()
    heads = rearrange(weight, "(head d_head) d_model -> head d_head d_model", d_head=sizes["d_head"])
    tapered: Tensor = rearrange(heads * amplitude[None, :, None], "head d_head d_model -> (head d_head) d_model")
    return tapered


def _norm_mean(name: str, scales: dict[str, float], model: ResolvedModel) -> float:
    posts = {model.spec.content.roles.get(role, "").rpartition("{l}")[2] for role in ("norm.ln1_post", "norm.ln2_post")}
    if name == "model.norm.weight":
        return scales["final_norm_mean"]
    return scales["post_norm_mean"] if any(post and name.endswith(post) for post in posts) else scales["norm_mean"]


def _output_rms(name: str, scales: dict[str, float]) -> float:
    for part, key in (("q_proj", "qk"), ("k_proj", "qk"), ("v_proj", "v"), ("o_proj", "o"), ("down_proj", "mlp_out")):
        if part in name:
            return scales[key]
    return scales["mlp_pre"]
