"""`--synthetic real` has what trained checkpoints have and random weights have not, measured on the running model."""

from __future__ import annotations

import pytest
import torch

from parity_audit.specs import miniature
from parity_audit.specs.load import list_specs
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.statistics import near_singular
from parity_audit.specs.tokenizer import BOS

MODELS = ("gpt2", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B", "gemma-2-2b-it")


@pytest.fixture(scope="module", params=MODELS)
def run(request):
    found = {}
    for size in ("mini", "real"):
        model = miniature.built(resolve_model(request.param), size=size).eval()
        model.set_attn_implementation("eager")
        tokens = torch.randint(8, 500, (1, 40), generator=torch.Generator().manual_seed(3))
        tokens[0, 0] = BOS
        with torch.no_grad():
            out = model(tokens, output_hidden_states=True, output_attentions=True)
        found[size] = (model, [state[0] for state in out.hidden_states], [pattern[0] for pattern in out.attentions])
    return found


def test_bos_has_a_massive_activation(run):
    def largest_over_median(size):
        stream = run[size][1][1]
        return float(stream[0].abs().max() / stream[1:].abs().median())

    assert largest_over_median("mini") < 20
    assert largest_over_median("real") > 100


def test_later_queries_attend_to_bos(run):
    def share(size):
        return float(run[size][2][1][:, 5:, 0].mean())

    assert share("mini") < 0.2
    assert share("real") > 0.8


def test_a_few_channels_outweigh_the_others_everywhere(run):
    def outliers(size):
        energy = run[size][1][1][1:].square().mean(0).sort().values
        return float(energy[-3:].mean() / energy.median())

    assert outliers("real") > 20 > outliers("mini")


def test_embeddings_share_a_direction(run):
    def cosine(size):
        table = torch.nn.functional.normalize(run[size][0].get_input_embeddings().weight[8:108], dim=-1)
        return float((table @ table.T).mean())

    assert abs(cosine("mini")) < 0.1
    assert cosine("real") > 0.2


def test_a_near_singular_matrix_keeps_its_size():
    weight = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(made := near_singular(weight))

    assert float(made.norm()) == pytest.approx(float(weight.norm()), rel=1e-5)
    assert float(values[0] / values[-1]) > 1e4


def test_a_mixture_has_the_parts_that_it_can_have():
    model = miniature.built(resolve_model("mistralai/Mixtral-8x7B-v0.1"), size="real")
    weight = dict(model.named_parameters())["model.layers.0.self_attn.o_proj.weight"]

    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert float(torch.linalg.cond(weight.double())) > 1e4


@pytest.mark.parametrize("name", sorted(spec.first_model for spec in list_specs()))
def test_every_architecture_can_have_them(name):
    built = miniature.built(resolve_model(name), size="real")

    assert all(bool(parameter.isfinite().all()) for parameter in built.parameters())
