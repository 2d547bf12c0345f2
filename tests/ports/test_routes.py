"""Clean ports that compute by other routes are at parity, a few of them here; benchmarks/clean_ports.py asks for all."""

from pathlib import Path

import pytest

from parity_audit.compare.verdict import judge_comparison
from parity_audit.core.report import Verdict
from tests.ports import patched, routes
from tests.ports.bench import bench

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
LLAMA = "meta-llama/Llama-3.2-1B"
SITES = Path(__file__).with_name("routes_sites.yaml")
GOOD = (Verdict.EXACT, Verdict.PARITY)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return bench(LLAMA, tmp_path_factory.mktemp("llama"), ("short", "left_padded"))


def judged(llama, route, **faults):
    model = routes.load(llama.checkpoint.path, "float32", "cpu", route=route, **faults)
    found = llama.compared(f"{route}-{faults}", model, SITES)
    return judge_comparison(found), {item.site: item.why for item in found.not_comparable}


@pytest.mark.parametrize(
    ("route", "site", "says"),
    [
        ("prescaled_q", "rot_q", "queries are multiplied by 0.125"),
        ("shifted_positions", "rot_k", "same function, other positions: positions are shifted by +1"),
        ("positions_from_padding", "rot_k", "same function, other positions: positions are shifted by a constant"),
        ("q_and_k_in_another_basis", "rot_q", "x the noise floor away"),
    ],
)
def test_tensors_that_differ_and_cancel_are_not_comparable_and_say_how(llama, route, site, says):
    (verdict, why), aside = judged(llama, route)

    assert verdict in GOOD, why
    assert says in aside[f"blocks.1.{site}"]


@pytest.mark.parametrize("route", ["online_softmax", "grouped", "head_major", "mask_1e9", "chunked_mlp", "fused"])
def test_other_routes_are_at_parity(llama, route):
    (verdict, why), _ = judged(llama, route)

    assert verdict in GOOD, why


@pytest.mark.parametrize("fault", [{"scale": 8.1}, {"eps": 1e-3}])
def test_the_same_routes_hide_no_fault(llama, fault):
    (verdict, _), _ = judged(llama, "prescaled_q+mask_1e9+fused", **fault)

    assert verdict is Verdict.MISMATCH


@pytest.mark.parametrize("patch", ["online_softmax", "query_chunks"])
def test_patched_transformers_models_are_at_parity(llama, patch):
    found = llama.compared(patch, patched.load(llama.checkpoint.path, "float32", "cpu", patch=patch))

    assert judge_comparison(found)[0] in GOOD, judge_comparison(found)[1]
