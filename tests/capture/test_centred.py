"""Captures and tensors without their means: what a port with centred weights is held against."""

import pytest
import torch
from einops import einsum

from parity_audit.backends.sink import write_site
from parity_audit.capture.centred import centred_copy
from parity_audit.capture.store import open_capture, write_manifest
from parity_audit.core.manifest import Manifest
from parity_audit.core.types import Checkpoint, Probe
from parity_audit.core.wire import RunRequest
from parity_audit.formulas.stored import centred_as

PROBE = Probe(name="short", purpose="", token_ids=((1, 2, 3),), mask=((1, 1, 1),))
SITES = ("blocks.0.resid_pre", "blocks.0.q", "logits")


def capture(folder):
    draw = torch.Generator().manual_seed(0)
    tensors = {site: torch.randn(1, 3, 8, generator=draw) + 1 for site in SITES}
    request = RunRequest(probe=PROBE, taps=(), out=str(folder))
    entries = tuple(write_site(request, site, value, torch.float32) for site, value in tensors.items())
    manifest = Manifest(backend="hf", dtype="float32", device="cpu", checkpoint=Checkpoint(repo_id="", path=""),
                        probes=(PROBE,), entries=entries)  # fmt: skip
    write_manifest(folder, manifest)
    return open_capture(folder), tensors


def test_a_copy_has_no_means_at_the_sites_that_are_named_and_the_rest_as_it_was(tmp_path):
    whole, tensors = capture(tmp_path / "whole")
    copy = centred_copy(whole, {"resid_pre", "logits"}, tmp_path / "copy")
    open_capture(copy.folder).verify()

    for site in ("blocks.0.resid_pre", "logits"):
        exact = tensors[site].double()
        torch.testing.assert_close(copy.tensor("short", site), exact - exact.mean(-1, keepdim=True), rtol=0, atol=1e-15)
    assert torch.equal(copy.tensor("short", "blocks.0.q"), tensors["blocks.0.q"])
    assert torch.equal(whole.tensor("short", "logits"), tensors["logits"])


@pytest.mark.parametrize(("role", "site"), [("attn.o", "attn_proj"), ("mlp.down", "mlp_proj"), ("unembed", "logits")])
def test_a_centred_projection_makes_the_centred_output(role, site):
    draw = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in ((5, 4), (8, 4), (8,)))
    y = einsum(x, weight, "token d_in, d_out d_in -> token d_out") + bias
    made = einsum(x, centred_as(role, weight, {site}), "token d_in, d_out d_in -> token d_out")

    torch.testing.assert_close(made + centred_as(f"{role}.bias", bias, {site}), y - y.mean(-1, keepdim=True))
    assert centred_as(role, weight, {"embed"}) is weight


def test_a_centred_table_has_centred_rows_and_other_tensors_are_left():
    table = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 1
    centred = centred_as("embed", table, {"embed"})

    assert centred is not None
    torch.testing.assert_close(centred, table - table.mean(-1, keepdim=True))
    assert centred_as("attn.q", table, {"embed", "attn_proj", "logits"}) is table
    assert centred_as("embed", None, {"embed"}) is None
