"""The sites of a mixture of experts: the router's logits and weights, and the outputs of the experts.

The routed experts read the input of the MLP that they replace. The output of the sublayer is their weighted sum, plus the output of
the shared expert, which takes all tokens, if there is one (`moe.shared`). Instead of a shared expert, a block may have an MLP beside
the routed experts (`norm.routed_post`, Gemma 4): then the MLP and the experts each have a norm of their own before and after them,
and the router has its own input norm.

There is one function per site. Each takes a `FormulaContext`, from which it asks for inputs, tensors and knobs.
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
from parity_audit.formulas.place import FormulaContext
from parity_audit.formulas.projections import project


def is_mixture(at: FormulaContext) -> bool:
    """Whether a block has routed experts."""
    return at.has("moe.router")


def beside_mlp(at: FormulaContext) -> bool:
    """Whether a block has an MLP beside its experts; the outputs of both are then normalised and added."""
    return at.has("norm.routed_post")


def router_input(at: FormulaContext) -> Tensor:
    """Return the input of a router that has a norm of its own, `[batch pos d_model]`."""
    return normed(at, at.site("resid_mid"), "norm.router") * float(at.knob("moe.router_input_scale"))


def router_logits(at: FormulaContext) -> Tensor:
    """Return the router's logits, `[batch pos expert]`."""
    x = at.site("ln2_router.out") if at.has("norm.router") else mlp_input(at)
    return project(x, at.tensor("moe.router"), at.weight("moe.router.bias"))


def router_weights(at: FormulaContext) -> Tensor:
    """Return the weights of the experts, `[batch pos expert]`, 0 for experts that are not chosen."""
    scored = at.site("mlp.router_logits")
    made = experts.router_weights(
        scored, _chosen(at, scored), router=at.knob("moe.router"), norm_topk=at.knob("moe.norm_topk"),
        temperature=at.knob("moe.temperature"), arithmetic=at.knob("moe.router_dtype"),
        bias=at.tensor("moe.choice_bias") if at.knob("moe.weights_biased") else None,
    )  # fmt: skip
    stored = at.weight("moe.expert_scale") if at.knob("moe.expert_scale") is not False else None
    return made * float(at.knob("moe.scale")) * (1.0 if stored is None else stored)


def _chosen(at: FormulaContext, scored: Tensor) -> Tensor:
    """Return which experts each token goes to, `[batch pos expert]`.

    These are the experts with the largest logits or, if there are groups or a bias for the choice, with the largest scores. If
    scores tie up to rounding, the experts that the capture shows are taken. The knob `moe.choice` may name another choice.
    """
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


def _shown(at: FormulaContext) -> Tensor | None:
    """Return which experts tokens went to in the capture, `[batch pos expert]`, or None if no router weights were captured."""
    return at.site("mlp.router_weights") != 0 if at.is_given("mlp.router_weights") else None


def mixture(at: FormulaContext) -> Tensor:
    """Return the output of the sublayer, `[batch pos d_model]`."""
    if beside_mlp(at):
        return at.site("mlp.dense_post.out") + at.site("mlp.routed_post.out")
    made = routed(at)
    return made + _shared(at) if at.has("moe.shared.gate") else made


def routed(at: FormulaContext) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs, `[batch pos d_model]`."""
    found = [_expert(at, e) for e in range(at.dim("n_experts"))]
    x = at.site("ln2_experts.out") if at.has("norm.experts") else mlp_input(at)
    weights, weighted, lost = _weights_as_read(at), at.knob("moe.weighted"), at.knob("moe.dropped")
    seen = None if lost == NO_TOKEN else _seen(at)
    return experts.mixture(x, weights, found, partial(combined, at), weighted=weighted, seen=seen)


def _weights_as_read(at: FormulaContext) -> Tensor:
    """Return the weights that the experts use, `[batch pos expert]`: the router's, or the router's read in another order per step.

    Raises:
        MissingTokens: the weights are read in another order, but only some tokens of the text are computed.
    """
    weights = at.site("mlp.router_weights")
    if at.knob("moe.weights_read") == BY_TOKEN:
        return weights
    steps = weights.split(at.whole_steps(), dim=1)
    return torch.cat([experts.read_as_rows_of_experts(step) for step in steps], dim=1)


def _seen(at: FormulaContext) -> Tensor:
    """Return the captured sum of the routed experts alone, `[batch pos d_model]`. Raises ValueError if it was not captured."""
    shown = next((site for site in ("mlp.routed", "mlp_proj", "mlp_out") if at.is_given(site)), None)
    if shown is None or at.has("moe.shared.gate") or (shown == "mlp_out" and at.has("norm.ln2_post")):
        raise ValueError("no capture shows the sum of the routed experts alone")
    return at.site(shown)


def _shared(at: FormulaContext) -> Tensor:
    """Return the output of the shared expert, multiplied per token by its gate if the checkpoint has one."""
    shared = experts.Expert(*(at.tensor(f"moe.shared.{name}") for name in ("gate", "up", "down")))
    made = shared.output(mlp_input(at), partial(hidden, at)) * float(at.knob("moe.shared_scale"))
    weigher = at.weight("moe.shared.router")
    return made if weigher is None else made * activation(at.knob("moe.shared_gate"))(project(mlp_input(at), weigher))


def _expert(at: FormulaContext, e: int) -> experts.Expert:
    biases = (_flat(at.weight(f"moe.{name}.bias.{e}")) for name in ("gate", "up", "down"))
    gate, up = cut_as_said(at, at.tensor(f"moe.gate.{e}"), at.tensor(f"moe.up.{e}"))
    return experts.Expert(gate, up, at.tensor(f"moe.down.{e}"), *biases)


def _flat(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.flatten()
