"""Routers with groups, experts with weighted inputs, chunks and rotations, against transformers' own modules or a closed form."""

import pytest
import torch
from transformers import DeepseekV3Config, Llama4TextConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter, apply_rotary_pos_emb_interleave
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from parity_audit.formulas.experts import (
    Expert,
    are_largest,
    chosen_experts,
    mixture,
    read_as_rows_of_experts,
    router_weights,
    scores_for_choice,
)
from parity_audit.formulas.mlp import gated
from parity_audit.formulas.place import Batch
from parity_audit.formulas.positions import visible
from parity_audit.formulas.rotary import angles, rotate


def hidden(pre, linear):
    return gated(pre, linear, name="silu")


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (8, 3), (4, 1)])
def test_a_router_with_groups_and_a_bias_chooses_as_that_of_deepseek(groups, kept):
    config = DeepseekV3Config(
        hidden_size=24, n_routed_experts=16, num_experts_per_tok=3, n_group=groups, topk_group=kept,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    router = DeepseekV3TopkRouter(config)
    draw = torch.Generator().manual_seed(groups)
    with torch.no_grad():
        router.weight.copy_(torch.randn(16, 24, generator=draw))
        router.e_score_correction_bias.copy_(0.3 * torch.randn(16, generator=draw))
        logits, weights, chosen = router(torch.randn(50, 24, generator=draw))

    scores = scores_for_choice(
        logits.double(), router="sigmoid", bias=router.e_score_correction_bias.double(), groups=groups, kept=kept
    )
    own = 2.5 * router_weights(logits.double(), chosen_experts(scores, 3), router="sigmoid", norm_topk=True)

    want = torch.zeros(50, 16, dtype=torch.float64).scatter(1, chosen, weights.double())
    assert torch.equal(own != 0, want != 0)
    torch.testing.assert_close(own, want, rtol=1e-5, atol=1e-6)


def test_the_bias_and_the_groups_are_seen_in_the_choice():
    scored = torch.randn(200, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    bias = 0.3 * torch.randn(16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    plain = chosen_experts(scored, 3)
    for other in ({"bias": bias}, {"groups": 4, "kept": 1}):
        assert not torch.equal(chosen_experts(scores_for_choice(scored, router="sigmoid", **other), 3), plain)


def test_weights_stand_on_what_experts_are_given_as_in_llama_4():
    config = Llama4TextConfig(hidden_size=24, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2)
    module, draw = Llama4TextMoe(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 4)
        x = torch.randn(1, 30, 24, generator=draw)
        want, logits = module(x)
    gate_up, down = module.experts.gate_up_proj.detach().double(), module.experts.down_proj.detach().double()
    experts = [
        Expert(gate=both[:, :16].mT, up=both[:, 16:].mT, down=back.mT) for both, back in zip(gate_up, down, strict=True)
    ]
    shared = [getattr(module.shared_expert, f"{name}_proj").weight.detach().double() for name in ("gate", "up", "down")]
    weights = router_weights(
        logits.double()[None], chosen_experts(logits.double()[None], 2), router="sigmoid", norm_topk=False
    )

    own = mixture(x.double(), weights, experts, hidden, weighted="inputs") + Expert(*shared).output(x.double(), hidden)

    torch.testing.assert_close(own[0], want.double(), rtol=1e-4, atol=1e-5)
    assert (own - mixture(x.double(), weights, experts, hidden)).abs().max() > 0.1


def test_a_query_sees_the_keys_of_its_own_chunk_counted_without_padding():
    mask = torch.tensor([[1] * 10, [0] * 3 + [1] * 7])
    seen = visible(mask, torch.arange(10), chunk=4)[:, 0]

    for row, padding in enumerate((0, 3)):
        for query in range(padding, 10):
            keys = [k for k in range(padding, query + 1) if (k - padding) // 4 == (query - padding) // 4]
            assert seen[row, query].nonzero()[:, 0].tolist() == keys


def test_neighbours_that_are_written_as_halves_are_what_deepseek_makes_in_transformers():
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 6, 16, generator=draw, dtype=torch.float64) for _ in range(2))
    frequencies = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    cos, sin = angles(torch.arange(6)[None], frequencies, torch.float64)
    twice = [torch.cat([table, table], -1) for table in (cos, sin)]
    want = apply_rotary_pos_emb_interleave(q, k, *twice)

    for x, true in zip((q, k), want, strict=True):
        made = rotate(x.transpose(1, 2), cos, sin, pairing="adjacent, written as halves")
        torch.testing.assert_close(made.transpose(1, 2), true)
    plain = [rotate(x.transpose(1, 2), cos, sin, pairing="adjacent") for x in (q, k)]
    scores = torch.einsum("bqhd,bkhd->bhqk", *plain)
    torch.testing.assert_close(scores, torch.einsum("bhqd,bhkd->bhqk", *want))


def test_weights_that_are_not_transposed_are_those_of_llama_4_in_transformers_4_54():
    """There `hidden.repeat(n_experts, 1)` `[(expert token) d]` is multiplied by the scores `[token expert]`, flattened."""
    tokens, count = 6, 4
    scores = torch.randn(2, tokens // 2, count, generator=torch.Generator().manual_seed(1))
    multiplied = torch.ones(tokens, 1).repeat(count, 1) * scores.reshape(-1, 1)

    own = read_as_rows_of_experts(scores)

    assert torch.equal(own.reshape(tokens, count), multiplied.reshape(count, tokens).T)


@pytest.mark.parametrize(
    ("first", "together", "steps"), [(None, 1, [7]), (4, 1, [4, 1, 1, 1]), (3, 3, [3, 3, 1]), (5, 8, [5, 2])]
)
def test_the_steps_of_a_run_are_its_prompt_the_tokens_behind_it_and_each_further_one(first, together, steps):
    rows = torch.ones(1, 7, dtype=torch.long)
    assert Batch(tokens=rows, mask=rows, positions=rows, decoded_from=first, at_once=together).steps == steps


@pytest.mark.parametrize(("apart", "right"), [(0.004, True), (0.0075, True), (0.02, False), (0.3, False)])
def test_experts_whose_scores_tie_in_bfloat16_are_as_right(apart, right):
    scores = torch.tensor([[1.0, 1.0 - apart, 0.2, -torch.inf]])
    second = torch.tensor([[False, True, False, False]])

    assert bool(are_largest(scores, second)) == right
