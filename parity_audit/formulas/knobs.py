"""Every knob in one table: what it is, which values it takes, which component it is in, and what holds where a spec is silent.

Standard library only: docs, specs, findings and the formulas read it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from parity_audit.formulas.choices import (
    ACTIVATIONS,
    BOTH,
    BY_PART,
    CACHED,
    CLAMPED,
    CLAMPED_PARTS,
    DELTA,
    DIRECTIONS,
    EVERY_KEY,
    EVERY_STREAM,
    EXPERT_CHOICES,
    FIRST_NORM,
    FLOAT32,
    FORWARD,
    FULL,
    GATE_ORDERS,
    GATE_UP,
    GATES,
    HIDDEN_START,
    IN_PLACE,
    INSIDE,
    K_ONLY,
    LARGEST,
    LAST_KEYS,
    LAWS,
    LOST,
    MASKS,
    MEASURED_ACTIVATIONS,
    MISSING,
    MOVES,
    NARROW,
    NO_TOKEN,
    NONE,
    NORM_SIZES,
    NOT_ACTIVE,
    NOT_FIRST,
    NOT_FIRST_KEYS,
    NOT_FIRST_REAL,
    NOT_REPEATED,
    OF_FIRST,
    OF_ROWS,
    OF_SECOND_WITHIN,
    ON_QUERIES,
    ON_SCORES,
    ORDERS,
    OUTSIDE,
    OWN,
    OWN_NORM,
    PAIRINGS,
    PLACES,
    PLACES_IN_A_HEAD,
    PLACES_IN_A_NORM,
    PLACES_IN_A_PENALTY,
    PLACES_IN_A_ROTATION,
    PLACES_IN_A_ROUTER,
    PLACES_IN_A_SOFTMAX,
    PLACES_IN_SCORES,
    POPULATION,
    POSITIONS_PER_STEP,
    Q_ONLY,
    REPEATED,
    ROTATED_PARTS,
    ROUNDED_TO,
    RULES,
    SAMPLE,
    SOFTMAX,
    SOME_SHARES,
    STANDS,
    STEPS_ASIDE,
    TAPS,
    TIMES_OWN,
    TWICE,
    UNIT_LENGTH,
    USUAL_SIZE,
    VALUES_TOO,
    WEIGHTED,
    WHOLE_PREFIX,
    WITH_MORE,
    ZERO_SINKS,
)
from parity_audit.formulas.knob import CHOICE, COUNT, FLAG, REAL, ROUNDING, STRUCTURE, Knob

FACTOR, SHIFT, EPS, CAP = (1e-4, 1e4), (-100.0, 100.0), (1e-14, 1.0), (0.1, 1e4)
CLAMPS = (1e-3, 1e3)
"""Ends between which a factor, a shift, an eps, a cap or a clamp of weights is searched: far beyond every released model."""


def _rounded(places: tuple[str, ...]) -> tuple[str, ...]:
    """The values of a dtype inside a component: none but its own, or a narrow one in one of these places."""
    return (FULL, *(f"{dtype} {place}" for dtype in NARROW for place in places))


def _norm(part: str, words: str) -> tuple[Knob, ...]:
    """The rows that norms of the stream and norms of queries and keys both have. `qk_norm.present`: no norm there."""
    of_stream = part == "norm"
    kinds = ("rms", "layer", "none") if of_stream else ("rms", "layer")
    roles = ("norm.ln1", "norm.ln2", "norm.ln1_post", "norm.ln2_post") if of_stream else ("norm.q", "norm.k")
    return (
        Knob(f"{part}.kind", CHOICE, part, f"RMS norm{', layer norm or none' if of_stream else ' or layer norm'}, of {words}.",
             "rms", kinds, judged=of_stream),
        Knob(f"{part}.eps", REAL, part, f"What {words} add to the mean square (or variance) inside the root.", 1e-5, span=EPS),
        Knob(f"{part}.offset", REAL, part, f"What is added to the stored weight of {words}.", 0.0, span=SHIFT),
        Knob(f"{part}.weight", CHOICE, part, f"Whose weight {words} have.", OWN, (OWN, NONE, TWICE, *roles), judged=True),
        Knob(f"{part}.bias", CHOICE, part, f"Whose bias {words} have.", OWN, (OWN, MISSING), judged=True,
             measured={TIMES_OWN: 1.0}),
        Knob(f"{part}.eps_place", CHOICE, part, f"Where the eps of {words} stands.", INSIDE, (INSIDE, OUTSIDE), judged=True),
        Knob(f"{part}.size", CHOICE, part, f"What {words} divide by.", USUAL_SIZE, NORM_SIZES, judged=True),
        Knob(f"{part}.times", COUNT, part, f"How often {words} are applied.", 1, span=(1, 3), judged=True),
        Knob(f"{part}.gain", REAL, part, f"Factor on what {words} make.", 1.0, span=FACTOR, judged=True),
        Knob(f"{part}.dtype", ROUNDING, part, f"A narrow dtype inside {words}, and where its rounding stands.", FULL,
             _rounded(PLACES_IN_A_NORM), judged=True),
    )  # fmt: skip


def _bias(part: str, words: str, component: str) -> Knob:
    """Whether a projection adds its bias; where nothing is said, it does if the checkpoint holds one."""
    meaning = f"Whether the projection {words} adds a bias; where a spec is silent, if the checkpoint holds one."
    return Knob(f"attention.{part}_bias", FLAG, component, meaning, None, (True, False))


ROWS: tuple[Knob, ...] = (
    Knob("embed.scale", REAL, "embed", "Factor on token embeddings.", 1.0, span=FACTOR, judged=True),
    Knob("embed.scale_dtype", CHOICE, "embed", "The dtype that the factor on embeddings is rounded to.", FLOAT32, (FLOAT32, FULL)),
    Knob("pos_embed.offset", COUNT, "pos_embed", "What is added to every position before its row of the table is taken.", 0,
         (*STANDS, *ROUNDED_TO), span=(-32, 32), judged=True),
    Knob("pos_embed.scale", REAL, "pos_embed", "Factor on learned positions.", 1.0, span=FACTOR, judged=True),
    *_norm("norm", "the norms of the stream"),
    Knob("norm.order", CHOICE, "norm",
         "Whether sublayers read normalised input (in its place), only their output is normalised (post), or the sum of both.",
         IN_PLACE, ORDERS, judged=True),
    *_norm("qk_norm", "the norms of queries and keys (or of the latents that they are made of)"),
    Knob("qk_norm.axis", CHOICE, "qk_norm", "Queries and keys are normalised per head, or over the whole projection.", "head",
         ("head", "projection")),
    Knob("qk_norm.present", CHOICE, "qk_norm", "Whether queries and keys are normalised.", "present", ("present", MISSING),
         judged=True),
    Knob("qk_norm.weighted", FLAG, "qk_norm",
         "Whether these norms have weights; where they have none, they are there though the checkpoint does not show it.", True,
         (True, False)),
    Knob("qk_norm.order", CHOICE, "qk_norm", "Queries and keys are normalised before or after the rotation.", "before rotation",
         ("before rotation", "after rotation"), judged=True),
    Knob("attention.clip_qkv", REAL, "rope", "Where queries, keys and values are clamped; nowhere where absent.", span=CLAMPS,
         optional=True, judged=True),
    Knob("attention.v_norm", FLAG, "qkv", "Whether values are normalised, by an RMS norm per head without weights.", False,
         (True, False)),
    Knob("attention.shared_layers", COUNT, "scores",
         "How many of the last layers attend to the keys and values of a layer before them: the last whose heads are as large.", 0,
         span=(0, 1024)),
    Knob("attention.shared_source", COUNT, "scores",
         "The layer whose keys and values one of these layers attends to, where it isn't the last whose heads are as large.",
         span=(0, 1024)),
    Knob("n_kv_heads", COUNT, "qkv",
         "Heads of keys and values; consecutive query heads share one, or read the one that a list says.", span=(1, 1024),
         per_head=True),
    _bias("q", "of queries", "qkv"),
    _bias("k", "of keys", "qkv"),
    _bias("v", "of values", "qkv"),
    _bias("o", "of the attention's output", "attn_proj"),
    Knob("rope.theta", REAL, "rope", "Base of the rotary frequencies; absent where nothing is rotated.", span=(10.0, 1e9),
         optional=True, confused_with=("rope.scaling", "rope.partial"), by_part=True),
    Knob("rope.scaling", STRUCTURE, "rope", "How the rotary frequencies are changed for long contexts.", optional=True,
         starts=({"rope_type": "linear", "factor": 4.0},
                 *({"rope_type": "proportional", "partial_rotary_factor": part} for part in ROTATED_PARTS)),
         confused_with=("rope.theta",), beside={"attention_factor": 1.0}),
    Knob("rope.pairing", CHOICE, "rope", "Which components of a head turn together, and where they are written.", "half",
         PAIRINGS, by_part=True),
    Knob("rope.partial", COUNT, "rope", "How many components of a head are rotated; all of them where absent.", span=(2, 1024),
         optional=True, confused_with=("rope.theta",), by_part=True),
    Knob("rope.offset", REAL, "rope", "What is added to every position.", 0.0, (*STANDS, *STEPS_ASIDE), span=SHIFT, judged=True,
         by_part=True),
    Knob("rope.table_dtype", CHOICE, "rope", "What is computed in float32 before queries and keys are rotated.",
         "float32 frequencies", ("float32 frequencies", "float32 table", FULL)),
    Knob("rope.dtype", ROUNDING, "rope", "A narrow dtype inside the rotation, and where its rounding stands.", FULL,
         _rounded(PLACES_IN_A_ROTATION), judged=True),
    Knob("rope.layers", CHOICE, "rope", "What is rotated.", BOTH, (BOTH, Q_ONLY, K_ONLY, VALUES_TOO), judged=True),
    Knob("rope.direction", CHOICE, "rope", "The sense of the rotation.", FORWARD,
         DIRECTIONS, judged=True, by_part=True),
    Knob("rope.first_dim", COUNT, "rope", "The first component of a head that is rotated.", 0, span=(0, 1024), judged=True),
    Knob("attention.scale", REAL, "scores", "Divisor of q.k; sqrt(d_head) where a spec is silent.", span=FACTOR, per_head=True,
         confused_with=("attention.softcap", "attention.temperature")),
    Knob("attention.scaled", CHOICE, "scores", "Where the scale of the scores stands.", ON_SCORES, (ON_SCORES, ON_QUERIES),
         judged=True, same_function=True),
    Knob("attention.softcap", REAL, "scores", "c in c tanh(s / c) on scores, or where they are cut off instead.", span=CAP,
         optional=True, confused_with=("attention.scale",), measured={CLAMPED: 1.0}),
    Knob("attention.alibi", REAL, "scores", "Slopes of a penalty for distance: a multiple of the usual ones, or one per head.",
         span=FACTOR, optional=True, judged=True, per_head=True, if_true=1.0),
    Knob("attention.alibi_dtype", ROUNDING, "scores", "A narrow dtype inside that penalty, and where its rounding stands.", FULL,
         _rounded(PLACES_IN_A_PENALTY), judged=True),
    Knob("attention.window", COUNT, "scores", "How many keys a query sees, itself included; all of them where absent.",
         span=(1, 1e6), optional=True),
    Knob("attention.window_first", COUNT, "scores", "How many of the first keys a query sees beyond its window as well.", 0,
         span=(0, 1e6), judged=True),
    Knob("attention.chunk", COUNT, "scores",
         "The length of the chunks that a text is cut into: a query sees the keys of its own chunk alone; all keys where absent.",
         span=(1, 1e6), optional=True, confused_with=("attention.window",)),
    Knob("attention.mask", CHOICE, "scores", "Which keys a query may attend to.", "causal", MASKS, judged=True,
         counted=(WHOLE_PREFIX, HIDDEN_START)),
    Knob("attention.heads", REAL, "z", "Factor on what a head attended to: one number, or one per head.", 1.0, span=SHIFT,
         judged=True, per_head=True),
    Knob("attention.bias", STRUCTURE, "scores", "What is added to scores at a distance between query and key, by distance.",
         optional=True, judged=True),
    Knob("attention.sinks", CHOICE, "pattern", "A logit per head that takes part in the softmax and in nothing else.", None,
         (OWN, ZERO_SINKS, None), judged=True, per_head=True, if_true=OWN, measured={TIMES_OWN: 1.0}),
    Knob("attention.temperature", REAL, "pattern", "Factor on the scores in the softmax.", 1.0, span=FACTOR, judged=True,
         confused_with=("attention.scale",)),
    Knob("attention.temperature_by_position", STRUCTURE, "rope",
         "Growth of the queries with the position p (or, where it `counts: places`, with the place in the row): "
         "1 + scale log(1 + floor((p + 1) / step)).", optional=True, judged=True,
         starts=tuple({"scale": 0.1, "step": step, **what} for what in ({}, {"counts": PLACES}) for step in POSITIONS_PER_STEP),
         confused_with=("attention.temperature",)),
    Knob("attention.weights", CHOICE, "pattern", "What makes the pattern of the scores.", SOFTMAX, LAWS, judged=True,
         measured={WITH_MORE: 1.0}),
    Knob("attention.softmax_dtype", ROUNDING, "pattern", "A narrow dtype inside the softmax, and where its rounding stands.", FULL,
         _rounded(PLACES_IN_A_SOFTMAX), judged=True),
    Knob("attention.scores_dtype", ROUNDING, "scores",
         "A narrow dtype inside the products of queries and keys, in front of their scale, and where its rounding stands.", FULL,
         _rounded(PLACES_IN_SCORES), judged=True),
    Knob("cache.keys", CHOICE, "z", "Which keys and values of a cache a decoded token attends to.", EVERY_KEY,
         (*LOST, *MOVES, *OF_ROWS), judged=True, counted=(NOT_FIRST_KEYS, LAST_KEYS, NOT_FIRST_REAL)),
    Knob("cache.dtype", CHOICE, "z", "The dtype in which a cache keeps keys and values.", FULL, (FULL, *CACHED), judged=True),
    Knob("attention.gate", CHOICE, "z_gated",
         "What is made of the gate that the attention's output is multiplied with, where a model has one.", "sigmoid",
         GATES, judged=True),
    Knob("delta.activation", CHOICE, "delta", "The activation behind the convolution of a linear attention.", "silu", ACTIVATIONS),
    Knob("delta.taps", CHOICE, "delta", "The order of the convolution's weights.", TAPS[0], TAPS, judged=True),
    Knob("delta.length_eps", REAL, "delta", "What is added to the squared length that queries and keys are divided by.", 1e-6,
         span=EPS),
    Knob("delta.unit_length", CHOICE, "delta", "What a linear attention divides by its length.", UNIT_LENGTH[0], UNIT_LENGTH,
         judged=True),
    Knob("delta.step_bias", FLAG, "delta", "Whether the stored bias of the time step is added to it.", True, (True, False),
         judged=True),
    Knob("delta.scale", REAL, "delta", "Divisor of the queries of a linear attention; sqrt(d_key) where a spec is silent.",
         span=FACTOR),
    Knob("delta.rule", CHOICE, "delta", "What becomes of the state at each token.", DELTA, RULES, judged=True),
    Knob("delta.chunk", COUNT, "delta", "After how many tokens the state of a linear attention starts again; never where absent.",
         span=(1, 1e6), optional=True, judged=True),
    Knob("delta.correction", REAL, "delta", "Factor on the share of its error that a state corrects.", 1.0, span=FACTOR,
         judged=True),
    Knob("delta.norm_eps", REAL, "delta_norm", "The eps of the norm of what a linear attention reads.", 1e-6, span=EPS),
    Knob("delta.gate", CHOICE, "delta_norm", "The activation of the gate of that norm.", "silu", ACTIVATIONS),
    Knob("delta.gate_order", CHOICE, "delta_norm", "Where the gate stands.", GATE_ORDERS[0], GATE_ORDERS, judged=True),
    Knob("mlp.input", CHOICE, "mlp", "Which norm the MLP reads.", OWN_NORM, (OWN_NORM, FIRST_NORM), judged=True),
    Knob("mlp.activation", CHOICE, "mlp", "The activation of the MLP.", "silu", ACTIVATIONS, measured=MEASURED_ACTIVATIONS),
    Knob("mlp.sparsity", REAL, "mlp",
         "Share of a normal distribution below the cut of the gate's projection, which is set to 0 there; no cut where absent.",
         span=(0.01, 0.999), optional=True),
    Knob("mlp.sparsity_spread", CHOICE, "mlp", "The variance that this cut is made with.", POPULATION, (POPULATION, SAMPLE),
         judged=True),
    Knob("mlp.gelu_root", REAL, "mlp", "The constant sqrt(2/pi) in the tanh form of GELU, as a program writes it.",
         math.sqrt(2 / math.pi), span=(0.1, 10.0)),
    Knob("mlp.limit", REAL, "mlp", "Where a clamped MLP clamps its inputs; nowhere where absent.", 7.0, span=CAP, optional=True),
    Knob("mlp.clamped", CHOICE, "mlp", "What a clamped MLP clamps.", CLAMPED_PARTS[0], CLAMPED_PARTS, judged=True),
    Knob("mlp.gate_up", CHOICE, "mlp", "Which of the two inner projections is activated, and how a fused tensor of both is cut.",
         "gate activated", GATE_UP, judged=True),
    Knob("moe.top_k", COUNT, "mlp.router", "Experts per token.", 1, span=(1, 1024)),
    Knob("moe.groups", COUNT, "mlp.router", "Groups of neighbouring experts.", 1, span=(1, 1024)),
    Knob("moe.top_groups", COUNT, "mlp.router", "Groups that a token's experts are chosen from.", 1, span=(1, 1024)),
    Knob("moe.choice_bias", FLAG, "mlp.router",
         "Whether a stored bias per expert takes part in the choice; where a spec is silent, if the checkpoint holds one.", None,
         (True, False)),
    Knob("moe.norm_topk", FLAG, "mlp.router", "Whether weights are divided by their sum over the chosen experts.", True,
         (True, False)),
    Knob("moe.router", CHOICE, "mlp.router", "What makes a weight of a router's logit.", "softmax",
         ("softmax", "sigmoid", "equal weights", "raw logits")),
    Knob("moe.scale", REAL, "mlp.router", "Factor on the router's weights.", 1.0, span=FACTOR, judged=True),
    Knob("moe.router_input_scale", REAL, "router_norm", "Factor on what the router reads behind a norm of its own.", 1.0,
         span=FACTOR, judged=True),
    Knob("moe.expert_scale", FLAG, "mlp.router",
         "Whether a stored factor per expert multiplies the weights; where a spec is silent, if the checkpoint holds one.", None,
         (True, False)),
    Knob("moe.shared_scale", REAL, "mlp", "Factor on what the expert of all tokens adds.", 1.0, span=FACTOR, judged=True),
    Knob("moe.shared_gate", CHOICE, "mlp",
         "What is made of the gate that weighs the expert of all tokens, where a model has one.", "sigmoid", GATES, judged=True),
    Knob("moe.temperature", REAL, "mlp.router", "Temperature of the router's softmax.", 1.0, span=FACTOR, judged=True),
    Knob("moe.choice", CHOICE, "mlp.router", "Which experts are taken.", LARGEST, EXPERT_CHOICES, judged=True),
    Knob("moe.router_dtype", ROUNDING, "mlp.router", "A narrow dtype inside the router, and where its rounding stands.", FULL,
         _rounded(PLACES_IN_A_ROUTER), judged=True),
    Knob("moe.weighted", CHOICE, "mlp", "What the router's weights multiply.", "outputs", WEIGHTED, judged=True),
    Knob("moe.dropped", CHOICE, "mlp", "What is missing where an expert takes only so many tokens.", NO_TOKEN,
         (NO_TOKEN, SOME_SHARES), judged=True),
    Knob("residual.parallel", FLAG, "residual", "Attention and MLP read the same stream, and both are added to it.", False,
         (True, False), judged=True),
    Knob("residual.scale", REAL, "residual", "Factor on what each sublayer adds to the stream.", 1.0, span=FACTOR, judged=True),
    Knob("residual.scalar", FLAG, "residual",
         "Whether the stream behind a block is multiplied by the block's stored number; where a spec is silent, if there is one.",
         None, (True, False)),
    Knob("per_layer.table_scale", REAL, "per_layer", "Factor on a block's own embeddings of tokens; 0 where they are left out.", 1.0,
         (0.0,), span=FACTOR),
    Knob("per_layer.project_scale", REAL, "per_layer", "Factor on what token embeddings are projected to for a block.", 1.0,
         span=FACTOR),
    Knob("per_layer.scale", REAL, "per_layer", "Factor on the sum of both.", 1.0, span=FACTOR),
    Knob("per_layer.streams", CHOICE, "residual",
         "The streams that what a block makes of its own embeddings is added to, where there are several.", NOT_FIRST,
         (NOT_FIRST, EVERY_STREAM, NOT_ACTIVE), judged=True),
    Knob("altup.active", COUNT, "altup", "Which of several streams a block computes on.", 0, span=(0, 64)),
    Knob("altup.router", CHOICE, "altup", "The activation of the router that predicts and corrects streams.", "tanh",
         ("tanh", "sigmoid", "linear"), judged=True),
    Knob("altup.router_scale", REAL, "altup", "Factor on what this router reads behind its norm.", 1.0, span=FACTOR),
    Knob("altup.share_offset", REAL, "altup", "What is added to each stream's share of the active one's error.", 1.0, span=SHIFT,
         judged=True),
    Knob("altup.limit", REAL, "altup",
         "Where the stored weights of coefficients are clamped; they are not where absent, as outside training.", span=CLAMPS,
         optional=True, judged=True),
    Knob("altup.least_size", REAL, "altup",
         "The least mean square that streams are divided by when they are brought to the size of the first; none where absent.",
         span=EPS, optional=True),
    Knob("altup.output_scale", FLAG, "per_layer",
         "Whether what the gate of a block's own embeddings reads is multiplied by a stored vector.", True, (True, False),
         judged=True),
    Knob("laurel.scale", REAL, "residual", "Factor on the stream plus attention plus the residual of low rank.", 1.0, span=FACTOR),
    Knob("laurel.adds_input", FLAG, "laurel", "Whether the residual of low rank is added to its own input.", True, (True, False),
         judged=True),
    Knob("residual.stream", REAL, "residual", "Factor on the stream that a sublayer's output is added to.", 1.0, span=SHIFT,
         judged=True),
    Knob("residual.skipped", FLAG, "residual", "Whether the stream behind a block is the one before it.", False, (True, False),
         judged=True),
    Knob("residual.repeated", CHOICE, "residual", "The block that is run twice.", NOT_REPEATED,
         (NOT_REPEATED, *REPEATED, OF_FIRST, OF_SECOND_WITHIN), judged=True),
    Knob("residual.blocks_dropped", COUNT, "final_norm", "How many of the last blocks the final norm does not wait for.", 0,
         span=(0, 1024), judged=True),
    Knob("residual.attn_out", REAL, "residual", "Factor on what attention adds.", 1.0, span=SHIFT, judged=True),
    Knob("residual.mlp_out", REAL, "residual", "Factor on what the MLP adds.", 1.0, span=SHIFT, judged=True),
    Knob("residual.pos_embed", REAL, "residual", "Factor on what learned positions add.", 1.0, span=SHIFT, judged=True),
    Knob("logits.scale", REAL, "logits", "Factor on the logits.", 1.0, span=FACTOR, judged=True),
    Knob("logits.softcap", REAL, "logits", "c in c tanh(y / c) on logits, or where they are cut off instead.", span=CAP,
         optional=True, confused_with=("logits.scale",), measured={CLAMPED: 1.0}),
    Knob("logits.shift", REAL, "logits", "A constant over the vocabulary, or `centred`: minus the mean over it.", 0.0, ("centred",),
         span=SHIFT, judged=True),
    Knob("logits.dtype", ROUNDING, "logits", "A narrow dtype inside the head, and where its rounding stands.", FULL,
         _rounded(PLACES_IN_A_HEAD), judged=True),
    Knob("logits.bias", CHOICE, "logits", "Whose bias the head adds.", OWN, (OWN, MISSING), judged=True, measured={TIMES_OWN: 1.0}),
)  # fmt: skip
KNOBS: dict[str, Knob] = {row.name: row for row in ROWS}
_OF_NORMS = {f"qk_{row.name}": row.name for row in _norm("norm", "")}
"""Of norms of queries and keys: what a spec says of the norms of the stream holds for them where it says no more."""


def said_by(name: str, known: Collection[str]) -> str | None:
    """The name under which a spec that knows these knobs speaks of one of them; None where it is silent."""
    other = _OF_NORMS.get(name)
    return name if name in known else other if other in known else None


def meant(name: str, value: Any) -> Any:
    """What a spec means by a value: where a knob's values are no truth values, `true` stands for one of them, `false` for none."""
    row = KNOBS.get(name)
    if row is None or row.if_true is None or not isinstance(value, bool):
        return value
    return row.if_true if value else row.default


def default(name: str) -> Any:
    """The value that holds where a spec does not name the knob.

    Raises:
        KeyError: no row has this name.
    """
    return KNOBS[name].default


def of_part(said: Any, part: str) -> Any:
    """A value as one of `choices.BY_PART` has it: queries or keys have their own where that is said."""
    return said[part] if isinstance(said, dict) and said.keys() == set(BY_PART) else said
