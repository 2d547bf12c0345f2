"""What the sites of a mixture of experts are made of: the router's logits and weights, what the experts make.

The routed experts read what an MLP reads there, and their sum is what the sublayer makes, with what one expert makes of all
tokens where there is one (`moe.shared`). A block may have an MLP of its own beside them instead (`norm.routed_post`, Gemma 4):
each of the two stands between norms of its own, and so does the router.

One function per site, each takes a `Place`, from which it asks for inputs, tensors and knobs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from parity_audit.formulas import experts
from parity_audit.formulas.activations import activation
from parity_audit.formulas.choices import BY_TOKEN, LARGEST, NO_TOKEN, OTHERS
from parity_audit.formulas.in_mlp import combined, cut_as_said, hidden, mlp_input
from parity_audit.formulas.in_norms import normed
from parity_audit.formulas.place import Place
from parity_audit.formulas.projections import project


def is_mixture(at: Place) -> bool:
    """Whether a block has routed experts."""
    return at.has("moe.router")


def beside_mlp(at: Place) -> bool:
    """Whether the experts stand beside an MLP, and what both make is normed and added."""
    return at.has("norm.routed_post")


def router_input(at: Place) -> Tensor:
    """What the router reads where it has a norm of its own, `[batch pos d_model]`."""
    return normed(at, at.site("resid_mid"), "norm.router") * float(at.knob("moe.router_input_scale"))


def router_logits(at: Place) -> Tensor:
    """`[batch pos expert]`."""
    x = at.site("ln2_router.out") if at.has("norm.router") else mlp_input(at)
    return project(x, at.tensor("moe.router"), at.weight("moe.router.bias"))


def router_weights(at: Place) -> Tensor:
    """`[batch pos expert]`, 0 where an expert is not chosen."""
    scored = at.site("mlp.router_logits")
    made = experts.router_weights(
        scored, _chosen(at, scored), router=at.knob("moe.router"), norm_topk=at.knob("moe.norm_topk"),
        temperature=at.knob("moe.temperature"), arithmetic=at.knob("moe.router_dtype"),
        bias=at.tensor("moe.choice_bias") if at.knob("moe.weights_biased") else None,
    )  # fmt: skip
    stored = at.weight("moe.expert_scale") if at.knob("moe.expert_scale") is not False else None
    return made * float(at.knob("moe.scale")) * (1.0 if stored is None else stored)


def _chosen(at: Place, scored: Tensor) -> Tensor:
    """The experts of each token: those of the largest logits, or, where groups or a bias take part, of the largest scores; of
    experts whose scores tie, those that a capture shows."""
    bias = at.weight("moe.choice_bias") if at.knob("moe.choice_bias") is not False else None
    groups, kept = at.knob("moe.groups"), at.knob("moe.top_groups")
    if groups > kept or bias is not None:
        scored = experts.scores_for_choice(scored, router=at.knob("moe.router"), bias=bias, groups=groups, kept=kept)
    count, choice = at.knob("moe.top_k"), at.knob("moe.choice")
    if choice not in (LARGEST, OTHERS):
        return experts.chosen_experts(scored, count, choice)
    chosen, shown = experts.chosen_experts(scored, count), _shown(at)
    if choice == OTHERS:
        if shown is None or bool((shown.sum(-1)[at.batch.mask.bool()] != count).any()):
            raise ValueError(f"no capture shows {count} experts for each token")
        return shown
    if shown is None:
        return chosen
    as_right = (shown.sum(-1) == count) & experts.are_largest(scored, shown)
    return torch.where(as_right[..., None], shown, chosen)


def _shown(at: Place) -> Tensor | None:
    """The experts that tokens went to in a capture, `[batch pos expert]`; None where none shows it."""
    return at.site("mlp.router_weights") != 0 if at.is_given("mlp.router_weights") else None


def mixture(at: Place) -> Tensor:
    """What the sublayer makes, `[batch pos d_model]`."""
    if beside_mlp(at):
        return at.site("mlp.dense_post.out") + at.site("mlp.routed_post.out")
    made = routed(at)
    return made + _shared(at) if at.has("moe.shared.gate") else made


def routed(at: Place) -> Tensor:
    """The weighted sum of what the chosen experts make, `[batch pos d_model]`."""
    found = [_expert(at, e) for e in range(at.dim("n_experts"))]
    x = at.site("ln2_experts.out") if at.has("norm.experts") else mlp_input(at)
    weights, weighted, lost = _weights_as_read(at), at.knob("moe.weighted"), at.knob("moe.dropped")
    seen = None if lost == NO_TOKEN else _seen(at)
    return experts.mixture(x, weights, found, partial(combined, at), weighted=weighted, seen=seen)


def _weights_as_read(at: Place) -> Tensor:
    """The weights that experts are given `[batch pos expert]`: those of the router, or what becomes of them in each step where they
    are read in another order. Raises MissingTokens where some tokens of the text are not there."""
    weights = at.site("mlp.router_weights")
    if at.knob("moe.weights_read") == BY_TOKEN:
        return weights
    steps = weights.split(at.whole_steps(), dim=1)
    return torch.cat([experts.read_as_rows_of_experts(step) for step in steps], dim=1)


def _seen(at: Place) -> Tensor:
    """What a capture shows of the routed experts' sum, `[batch pos d_model]`; raises ValueError where none shows it."""
    shown = next((site for site in ("mlp.routed", "mlp_proj", "mlp_out") if at.is_given(site)), None)
    if shown is None or at.has("moe.shared.gate") or (shown == "mlp_out" and at.has("norm.ln2_post")):
        raise ValueError("no capture shows the sum of the routed experts alone")
    return at.site(shown)


def _shared(at: Place) -> Tensor:
    """What the expert of all tokens adds; a token's own gate weighs it where the checkpoint has one."""
    shared = experts.Expert(*(at.tensor(f"moe.shared.{name}") for name in ("gate", "up", "down")))
    made = shared.output(mlp_input(at), partial(hidden, at)) * float(at.knob("moe.shared_scale"))
    weigher = at.weight("moe.shared.router")
    return made if weigher is None else made * activation(at.knob("moe.shared_gate"))(project(mlp_input(at), weigher))


def _expert(at: Place, e: int) -> experts.Expert:
    biases = (_flat(at.weight(f"moe.{name}.bias.{e}")) for name in ("gate", "up", "down"))
    gate, up = cut_as_said(at, at.tensor(f"moe.gate.{e}"), at.tensor(f"moe.up.{e}"))
    return experts.Expert(gate, up, at.tensor(f"moe.down.{e}"), *biases)


def _flat(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.flatten()
