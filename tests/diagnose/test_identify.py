"""The whole of identification: nothing on clean ports, only suspects fitted, several faults at once, in time."""

import time

import pytest
import torch
from tiny_port import PROBES, Port, evidence, found

from parity_audit.diagnose.fit.sides import sites_with_formula
from parity_audit.diagnose.fitting import causes_at

PORT = Port(cap=50.0, logit_cap=30.0, score_std=15.0, embed_std=0.02, window=(20, None))
HIDDEN = ("attn_scores", "pattern")


@pytest.mark.parametrize("hide", [(), HIDDEN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clean_ports_are_never_accused(hide: tuple[str, ...], dtype: torch.dtype):
    for seed in range(5):
        reference = PORT.but(seed=seed, dtype=torch.float64)
        assert found(reference.but(dtype=dtype, hide=hide), reference) == {}


@pytest.mark.parametrize("hide", [(), HIDDEN])
def test_seven_faults_at_once(hide: tuple[str, ...]):
    wrong = PORT.but(
        scale=14.9666, cap=None, window=(19, None), theta=10000.0, eps=1e-6, act="gelu", logit_cap=None, hide=hide
    )

    findings = found(wrong, PORT)

    assert findings.keys() == {
        "attention.scale", "attention.softcap", "attention.window", "rope.theta", "norm.eps", "mlp.activation",
        "logits.softcap",
    }  # fmt: skip


def test_only_suspects_are_fitted():
    wrong = PORT.but(scale=15.0, act="silu", embed_scale=3.0)

    assert found(wrong, PORT, {"mlp"}).keys() == {"mlp.activation"}
    assert found(wrong, PORT, {"embed", "scores"}).keys() == {"embed.scale", "attention.scale"}
    assert found(wrong, PORT, set()) == {}


def test_four_layers_cost_a_bounded_number_of_forward_passes():
    port = PORT.but(n_layers=4, d_head=128, d_model=256, window=None, hide=HIDDEN)
    started = time.process_time()
    sides = [evidence(port, probes=PROBES) for _ in range(2)]
    captured = time.process_time()
    causes_at(sides[0], sides[1], sites_with_formula(sides[0]))

    # Processor time of one process, so that what else runs on the machine does not count; 40 times in November 2026.
    assert time.process_time() - captured < 200 * (captured - started)
