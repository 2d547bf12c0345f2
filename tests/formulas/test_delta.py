"""The gated delta rule against closed forms, torch's own convolution and transformers' own recurrence."""

import pytest
import torch
import torch.nn.functional as F

from parity_audit.formulas import delta
from parity_audit.formulas.choices import DECAYED, DELTA, GATE_ORDERS, TAPS, UNDECAYED

torch.manual_seed(0)
BATCH, POS, HEADS, KEY, VALUE = 2, 7, 3, 4, 5
Q, K = (torch.randn(BATCH, POS, HEADS, KEY, dtype=torch.float64) for _ in "qk")
V = torch.randn(BATCH, POS, HEADS, VALUE, dtype=torch.float64)
KEPT, CORRECTED = (torch.rand(BATCH, POS, HEADS, dtype=torch.float64) for _ in "gb")


@pytest.mark.parametrize("order", TAPS)
def test_the_convolution_is_causal_and_that_of_torch(order):
    x, weight = torch.randn(2, 9, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    own = weight if order == TAPS[0] else weight.flip(-1)
    right = F.conv1d(x.mT, own[:, None], padding=3, groups=6)[..., :9].mT

    assert torch.allclose(delta.convolved(x, weight, lambda y: y, order=order), right, rtol=0, atol=1e-14)


def test_the_eps_of_a_length_stands_inside_the_root():
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)

    assert delta.of_unit_length(x, 0.0).tolist() == pytest.approx([0.6, 0.8], abs=1e-15)
    assert delta.of_unit_length(x, 144.0).tolist() == pytest.approx([3 / 13, 4 / 13], abs=1e-15)


def test_what_is_kept_of_a_state():
    kept = delta.kept_share(torch.zeros(1), torch.zeros(1), torch.zeros(1))

    assert float(kept) == pytest.approx(0.5)  # exp(-log(1 + e^0))


def test_one_token_is_read_as_its_value_times_its_key_and_query():
    made = delta.read_states(Q[:, :1], K[:, :1], V[:, :1], KEPT[:, :1], CORRECTED[:, :1])

    assert torch.allclose(made, (Q * K).sum(-1)[:, :1, :, None] * V[:, :1] * CORRECTED[:, :1, :, None])


def test_without_correction_it_is_linear_attention_with_decay():
    made = delta.read_states(Q, K, V, KEPT, CORRECTED, rule=DECAYED)
    products = torch.einsum("bihd,bjhd->bhij", Q, K)
    passed = KEPT.log().cumsum(1)
    decay = (passed[:, :, None] - passed[:, None]).exp().permute(0, 3, 1, 2).tril()
    right = torch.einsum("bhij,bjhd->bihd", products * decay, V * CORRECTED[..., None])

    assert torch.allclose(made, right, rtol=0, atol=1e-12)


def test_a_value_that_is_corrected_whole_is_read_back_by_its_key():
    """With all corrected and no decay a state gives back exactly what was stored last for a key of length 1."""
    key = delta.of_unit_length(K, 0.0)
    made = delta.read_states(key, key, V, KEPT, torch.ones_like(KEPT), rule=UNDECAYED)

    assert torch.allclose(made, V, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", [DELTA, UNDECAYED])
def test_the_rule_is_that_of_transformers(rule):
    """Its own recurrence computes in float32."""
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    kept = torch.ones_like(KEPT) if rule == UNDECAYED else KEPT
    right, _ = theirs.torch_recurrent_gated_delta_rule(
        Q,
        K,
        V,
        g=kept.log(),
        beta=CORRECTED,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )
    q, k = (delta.of_unit_length(x, 1e-6) for x in (Q, K))
    made = delta.read_states(q / KEY**0.5, k, V, KEPT, CORRECTED, rule=rule)

    assert torch.allclose(made, right.double(), rtol=0, atol=2e-6)


def test_the_gate_stands_behind_the_norm_or_in_front_of_it():
    out, gate = torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    weight = torch.tensor([1.0, 0.5], dtype=torch.float64)
    behind = delta.gated_norm(out, gate, weight, eps=0.0, order=GATE_ORDERS[0])
    before = delta.gated_norm(out, gate, weight, eps=0.0, order=GATE_ORDERS[1])

    assert behind[0].tolist() == pytest.approx([3 / 12.5**0.5, 4 / 12.5**0.5])
    assert before[0].tolist() == pytest.approx([3 / 36.5**0.5, 4 / 36.5**0.5])


def test_a_state_that_starts_again_is_that_of_texts_of_their_own():
    made = delta.read_states(Q, K, V, KEPT, CORRECTED, chunk=3)
    parts = zip(*(x.split(3, 1) for x in (Q, K, V, KEPT, CORRECTED)), strict=True)
    right = torch.cat([delta.read_states(*part) for part in parts], 1)

    assert Q.shape[1] > 3
    assert torch.equal(made, right)
    assert not torch.allclose(made, delta.read_states(Q, K, V, KEPT, CORRECTED))
