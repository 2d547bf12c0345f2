"""Synthetic checkpoints with an architecture's real constants, drawn from a seed, in several sizes.

`mini` has about 1M parameters, `small` about 150M, and `full` the real sizes. `full` is stored in bfloat16, as models
of that size are released, which halves the memory to make it and the space on disk. `resaved` is `mini` with the
config.json that the installed transformers writes; the other sizes keep the keys of the released config.json. `real` is
`mini` with the statistics of trained weights (`statistics`).

The files are laid out as a hub cache under the real repository id, so that every backend loads the model by name
through its ordinary code path with the hub offline. Of the constants only sizes are replaced. transformers itself
builds the modules and writes the files, so tensor names, shapes and ties are those of a real release. `draws` defines
the distribution of the weights.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from packaging.version import Version
from torch import Tensor, nn

from parity_audit.core.errors import UsageError
from parity_audit.core.text_names import text_names
from parity_audit.core.types import Checkpoint
from parity_audit.specs.canonical import written_name
from parity_audit.specs.draws import DEFAULT_SCALES, draw, inputs_of, tapered
from parity_audit.specs.expr import evaluate
from parity_audit.specs.installed import instead, lacks, release
from parity_audit.specs.other_forms import QUANTISED
from parity_audit.specs.resolve import ResolvedModel
from parity_audit.specs.schema import ModelEntry, Spec
from parity_audit.specs.sealed import sealed
from parity_audit.specs.skeleton import config_of
from parity_audit.specs.statistics import make_real
from parity_audit.specs.tokenizer import BOS, EOS, PAD, write_tokenizer
from parity_audit.specs.view import config_names, dims, knob_values, role_tensors
from parity_audit.specs.wrapped import TEXT_MODEL, WRAPPED_IN

RESAVED, REAL = "resaved", "real"
AS_MINI = (RESAVED, REAL)
"""The kinds of checkpoints that have the sizes of `mini`."""
FULL = "full"
SIZES = ("mini", "small", FULL, *AS_MINI)
MARKER = "parity_audit_synthetic.json"
RECIPE = 6
TODAYS_NAMES = Version("5.0")
"""The first release of transformers with today's tensor names. Earlier releases name the tensors of experts differently
and store rotary tables, so the checkpoints that they write have other bytes and need another key."""
SHARD_BYTES = "1GB"
"""The largest size of a weight file; writing it needs the same amount of memory in addition."""
HEAD_NORMS = "qk_norm_mean"
"""The scale with the mean of query and key norm weights, for specs in which it differs from that of the other norms."""
WITHOUT_OFFSET = "norm.delta"
"""The role of norms whose stored weight is used as it is, even if the norms of the residual stream add an offset to theirs."""
NOT_OURS = (QUANTISED, WRAPPED_IN)
"""Keys of a released config that are removed in its miniature, which has plain weights, those of the text model alone."""
REPEATED = "attention_types"
"""GPT-Neo's key for the kinds of its layers: `[[[kind, ...], number of repetitions]]`."""
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "activation_sparsity_pattern")


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """Everything that determines the bytes of a checkpoint.

    `around` is the config of the multimodal model around the text model, empty if there is none.
    """

    model: ResolvedModel
    config: dict[str, Any]
    scales: dict[str, float]
    kinds: tuple[tuple[str, str], ...]
    size: str
    seed: int
    around: dict[str, Any]

    @property
    def repo_id(self) -> str:
        """The real repository id; for a local directory, an id that no hub has, made from the directory's name."""
        if not self.model.local:
            return self.model.repo_id
        name = re.sub(r"[^A-Za-z0-9]+", "-", Path(self.model.repo_id).resolve().name).strip("-")
        return f"local/{name or 'model'}"

    @property
    def key(self) -> str:
        content: list[Any] = [RECIPE, self.config, self.scales, self.kinds, self.seed, self.repo_id]
        content += [self.size] if self.size in AS_MINI else []
        content += [self.around] if self.around else []
        content += [] if Version(release()) >= TODAYS_NAMES else [release()]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def make(model: ResolvedModel, *, size: str = "mini", seed: int = 0, root: Path) -> Checkpoint:
    """Return a synthetic checkpoint of a model. It is made once per size, seed and recipe, and verified on every call.

    Of a local directory only the config is used; its weights are not read. Every backend then loads the synthetic
    checkpoint, under a name of its own.

    Raises:
        UsageError: `size` is unknown, the spec does not define that size, or the installed transformers is older than
            the model.
    """
    recipe = _recipe(model, size, seed)
    repo = recipe.repo_id.replace("/", "--")
    home = root / f"{repo}-{size}-{seed}-{recipe.key}"
    snapshot = home / "hub" / f"models--{repo}" / "snapshots" / recipe.key
    sealed(home, snapshot, lambda folder: _write(folder / snapshot.relative_to(home), recipe))
    return Checkpoint(
        repo_id=recipe.repo_id,
        path=str(snapshot),
        by_name=True,
        hf_home=str(home),
        synthetic=size,
        fingerprint=f"synthetic-{recipe.key}",
    )


def built(model: ResolvedModel, *, size: str = "mini", seed: int = 0) -> nn.Module:
    """Return the module with the weights that `make` would store, built in memory by transformers. Raises UsageError as `make`."""
    recipe = _recipe(model, size, seed)
    return _drawn_model(recipe, dims(model.spec, recipe.config))


def _recipe(model: ResolvedModel, size: str, seed: int) -> _Recipe:
    if without := lacks(model.config):
        raise UsageError(without, code="model-type-not-installed", hint=instead(model.config))
    content = model.spec.content
    return _Recipe(
        model=model, config=_config(model, size),
        scales={**DEFAULT_SCALES, **content.weight_scales, **_own(model).weight_scales},
        kinds=tuple(content.draws.items()), size=size, seed=seed, around=_own(model).around,
    )  # fmt: skip


def _config(model: ResolvedModel, size: str) -> dict[str, Any]:
    """Return the released config with its sizes replaced and the special ids of the tiny tokenizer; `full` keeps both."""
    known = model.spec.content.miniature
    sized = "mini" if size in AS_MINI else size
    if size not in SIZES or (sized != FULL and sized not in known):
        raise UsageError(
            f"`{size}` is not a size of a synthetic checkpoint", code="unknown-size", expected=", ".join(SIZES)
        )
    released = {key: value for key, value in model.config.items() if key not in NOT_OURS}
    config = {**released, written_name(model.config, "torch_dtype"): "bfloat16" if sized == FULL else "float32"}
    if sized == FULL:
        return config
    sizes = {**known[sized], **_own(model).miniature.get(sized, {})}
    sizes = {key: value for key, value in sizes.items() if config.get(written_name(config, key), value) is not None}
    config |= {written_name(config, key): value for key, value in sizes.items()}
    config = {**config, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    n_layers = int(evaluate(str(model.spec.content.dims["n_layers"]), config_names(config)))
    config |= {key: config[key][:n_layers] for key in PER_LAYER if isinstance(config.get(key), list)}
    if REPEATED in config:
        config[REPEATED] = [[kinds, n_layers // len(kinds)] for kinds, _ in config[REPEATED][:1]]
    return config


def _own(model: ResolvedModel) -> ModelEntry:
    """Return the spec's entry for this model; for a model that the spec does not list, an entry with just its config."""
    return model.spec.content.models.get(model.repo_id) or ModelEntry(config=model.config)


def _write(folder: Path, recipe: _Recipe) -> None:
    """Write the files of a snapshot directory, and the `refs/main` file that makes it the current snapshot of the repository."""
    folder.mkdir(parents=True)
    sizes = dims(recipe.model.spec, recipe.config)
    model, config = _drawn_model(recipe, sizes), recipe.config
    if recipe.around:
        config = {**recipe.around, TEXT_MODEL: config}
        model = _put_inside(model, config)
    _save(model, folder)
    if recipe.size != RESAVED:
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / MARKER).write_text(json.dumps({"size": recipe.size, "seed": recipe.seed, "sizes_only": sorted(sizes)}))
    write_tokenizer(folder, min(sizes["d_vocab"], 512))
    refs = folder.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(folder.name)


def _save(model: nn.Module, folder: Path) -> None:
    """Save the weights and the config with transformers, without a progress bar and without generation_config.json."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, max_shard_size=SHARD_BYTES)  # type: ignore[operator]
    finally:
        if shown:
            logging.enable_progress_bar()
    (folder / "generation_config.json").unlink(missing_ok=True)


def _drawn_model(recipe: _Recipe, sizes: Mapping[str, int]) -> nn.Module:
    """Return the model as transformers builds it, with random values in every parameter."""
    model = _empty_model(recipe.config, torch.bfloat16 if recipe.size == FULL else torch.float32)
    rotary = _plain_rotary(recipe, sizes)
    offset = _norm_offset(recipe)
    for name, parameter, owner in _drawn(model, recipe.model.spec):
        value = draw(
            name, tuple(parameter.shape), seed=recipe.seed, scales=recipe.scales, kinds=recipe.kinds,
            norm=_norm_scale(name, owner, recipe), offset=0.0 if WITHOUT_OFFSET in _roles_of(name, recipe.model.spec) else offset,
            fan_in=inputs_of(tuple(parameter.shape), transposed=_stored_transposed(owner, parameter)),
        )  # fmt: skip
        if rotary is not None and name.endswith(("q_proj.weight", "k_proj.weight")):
            value = tapered(value, rotary, sizes["d_head"])
        parameter.data.copy_(value)
    if recipe.size == REAL:
        make_real(model, recipe.model.spec, recipe.config, seed=recipe.seed)
    return model


def _empty_model(config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """Return the model with allocated but uninitialised parameters; the usual initialisation would only cost time."""
    import transformers

    older = Version(release()) < TODAYS_NAMES
    place = importlib.import_module(f"transformers.{'modeling_utils' if older else 'initialization'}")
    made = config_of({key: value for key, value in config.items() if key not in ("torch_dtype", "dtype")})
    architecture = getattr(transformers, config["architectures"][0])
    with place.no_init_weights():
        model = architecture._from_config(made, **{"torch_dtype" if older else "dtype": dtype})
    model.tie_weights()
    return cast(nn.Module, model)


def _put_inside(text: nn.Module, config: dict[str, Any]) -> nn.Module:
    """Return a multimodal model that contains this text model. All its other parameters are 0; text input does not use them."""
    whole = _empty_model(config, next(text.parameters()).dtype)
    held, given = whole.state_dict(), text.state_dict()
    for tensor in held.values():
        tensor.zero_()
    for own, name in text_names(held).items():
        held[name].copy_(given[own])
    whole.tie_weights()  # type: ignore[operator]
    return whole


def _drawn(model: nn.Module, spec: Spec) -> list[tuple[str, Tensor, nn.Module]]:
    """Return (name, tensor, owning module) of every parameter, and of the buffers that have a role; tied parameters once."""
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if _roles_of(name, spec)]
    every: list[tuple[str, Tensor]] = [*model.named_parameters(), *buffers]
    return [(name, tensor, model.get_submodule(name.rpartition(".")[0])) for name, tensor in every]


def _roles_of(name: str, spec: Spec) -> set[str]:
    """Return the roles (such as `norm.ln1`) that the spec gives to a checkpoint tensor of this name."""
    pattern = ".".join("{l}" if part.isdigit() else part for part in name.split("."))
    return {role for role, entry in spec.content.roles.items() if entry and pattern in role_tensors(entry)}


def _stored_transposed(owner: nn.Module, parameter: Tensor) -> bool:
    """Return whether a weight is stored as `[in, out]`: in GPT-2's Conv1D, and for experts with `is_transposed`."""
    return type(owner).__name__ == "Conv1D" or (parameter.ndim == 3 and bool(getattr(owner, "is_transposed", False)))


def _norm_scale(name: str, owner: nn.Module, recipe: _Recipe) -> str | None:
    """Return the key of the scale for the mean of a norm's weights; None if the parameter does not belong to a norm."""
    if "norm" not in type(owner).__name__.lower():
        return None
    roles = _roles_of(name, recipe.model.spec)
    if "norm.final" in roles:
        return "final_norm_mean"
    if HEAD_NORMS in recipe.scales and roles & {"norm.q", "norm.k"}:
        return HEAD_NORMS
    return "post_norm_mean" if roles & {"norm.ln1_post", "norm.ln2_post"} else "norm_mean"


def _norm_offset(recipe: _Recipe) -> float:
    """Return the constant that the architecture adds to its norm weights, 0 if it adds none."""
    known = knob_values(recipe.model.spec, recipe.config).get("norm.offset")
    return float(known.value) if known is not None and known.value is not None else 0.0


def _plain_rotary(recipe: _Recipe, sizes: Mapping[str, int]) -> float | None:
    """Return the rotary base if all dimensions of a head are rotated and are paired by halves; else None."""
    known = knob_values(recipe.model.spec, recipe.config)
    partial, pairing = known.get("rope.partial"), known.get("rope.pairing")
    whole = partial is None or partial.value == sizes["d_head"]
    if "rope.theta" not in known or not whole or (pairing is not None and pairing.value != "half"):
        return None
    return float(known["rope.theta"].value)
