"""What fits into `--disk`: chosen by cost, and every choice said by name."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from parity_audit.backends.taps import Recorder
from parity_audit.capture.bounded import EDGE, ENDS, LONG, ROOM, SPREAD, Writes, kept_positions, reduce_to_fit
from parity_audit.capture.estimate import planned_cost
from parity_audit.capture.probes import plan_probes
from parity_audit.capture.scratch import Scratch
from parity_audit.core.errors import NotJudged, UsageError
from parity_audit.core.types import SiteTap
from parity_audit.core.wire import RunRequest

CONFIG = {"vocab_size": 1000, "bos_token_id": 1, "sliding_window": 1024, "max_position_embeddings": 4096}
SIZES = {"d_model": 64, "d_vocab": 1000, "n_heads": 4, "n_kv_heads": 2, "d_head": 16, "d_mlp": 128}
SITES = ("embed", "blocks.0.resid_pre", "blocks.0.q", "blocks.0.attn_scores", "blocks.0.resid_post", "logits")
WRITES = Writes(taps=[SiteTap(site=site, module=site) for site in SITES], sizes=SIZES, repair=True)
PROBES = plan_probes(CONFIG)
WHOLE = WRITES.total(PROBES)


def chosen(bound):
    return reduce_to_fit(PROBES, (), WRITES, CONFIG, bound)


def test_a_bound_that_is_wide_enough_changes_nothing():
    assert chosen(None).probes == chosen(WHOLE).probes == PROBES
    assert chosen(None).left_out == chosen(WHOLE).left_out == ()
    assert chosen(None).needed == WHOLE


def test_first_positions_of_the_long_probe_then_sites_then_whole_probes_are_left_out():
    long = next(probe for probe in PROBES if probe.name == "long")
    only_long = chosen(WHOLE - 1)
    kept = next(probe for probe in only_long.probes if probe.name == "long").kept
    assert [gap.what for gap in only_long.left_out] == ["positions of probe long"]
    assert only_long.left_out[0].why.endswith(
        f"{len(kept)} of {long.shape[1]} are kept: both ends, the edges of windows, a spread"
    )

    narrow = chosen(only_long.needed - 1)
    assert [gap.what for gap in narrow.left_out] == ["positions of probe long", "sites inside blocks on probe repeated"]
    least = WRITES.of(PROBES[0])
    alone = chosen(least)
    assert [probe.name for probe in alone.probes] == ["short"]
    assert {f"probe {probe.name}" for probe in PROBES[1:]} == {gap.what for gap in alone.left_out}
    with pytest.raises(UsageError) as error:
        chosen(least - 1)
    assert (error.value.code, "probe short alone writes up to" in error.value.message) == ("disk-bound", True)


def test_without_a_bound_captures_of_one_and_a_half_gibibytes_are_whole_and_larger_ones_are_cut():
    """Twice the sites are twice the bytes: the first number of sites beyond 1.5 GiB is where positions are chosen."""
    layers = (3 << 29) // WHOLE
    below, above = (replace(WRITES, taps=[*WRITES.taps] * count) for count in (layers, layers + 1))
    assert below.total(PROBES) <= ROOM < above.total(PROBES)
    assert reduce_to_fit(PROBES, (), below, CONFIG, None).left_out == ()
    fit = reduce_to_fit(PROBES, (), above, CONFIG, None)
    assert [gap.what for gap in fit.left_out] == ["positions of probe long"]
    assert "more than 1.6 GB, which a larger --disk allows" in fit.left_out[0].why
    assert reduce_to_fit(PROBES, (), above, CONFIG, above.total(PROBES)).left_out == ()


def test_without_a_bound_no_probe_is_left_out_however_large_the_model():
    huge = replace(WRITES, taps=[*WRITES.taps] * 10_000)
    fit = reduce_to_fit(PROBES, (), huge, CONFIG, None)
    assert [probe.name for probe in fit.probes] == [probe.name for probe in PROBES]
    assert {probe.sites for probe in fit.probes[1:]} == {"residual"}
    assert fit.needed == huge.total(fit.probes) > ROOM


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2, 0.1])
def test_what_is_chosen_is_within_the_bound(share):
    fit = chosen(int(WHOLE * share))
    assert fit.needed == WRITES.total(fit.probes) <= WHOLE * share


def test_a_text_of_the_users_own_is_never_left_out():
    own = PROBES[1:2]
    fit = reduce_to_fit(PROBES[:1], own, WRITES, CONFIG, WRITES.total([*PROBES[:1], *own]))
    assert (fit.probes, fit.left_out) == (PROBES[:1], ())


def test_ends_window_edges_and_a_spread_are_kept():
    kept = kept_positions(1088, (1024,))
    assert set(range(ENDS)) | set(range(1088 - ENDS, 1088)) | set(range(1024 - EDGE, 1024 + EDGE)) < set(kept)
    assert max(later - earlier for earlier, later in itertools.pairwise(kept)) <= 1088 // (SPREAD - 1) + 1
    assert len(kept) < LONG < 1088


def test_a_recorder_writes_the_positions_that_are_kept(tmp_path):
    probe = next(probe for probe in chosen(WHOLE - 1).probes if probe.name == "long")
    recorder = Recorder(request=RunRequest(probe=probe, taps=(), out=str(tmp_path)))
    values = torch.arange(probe.shape[1], dtype=torch.float32)[None, :, None].expand(1, -1, 3)
    recorder.write("blocks.0.resid_post", values)
    entry = recorder.entries["blocks.0.resid_post"]
    from safetensors.torch import load_file

    assert load_file(tmp_path / entry.file)["x"][0, :, 0].tolist() == list(probe.kept)
    seen = probe.as_captured()
    assert (seen.shape[1], seen.length, entry.shape) == (len(probe.kept), probe.shape[1], (1, len(probe.kept), 3))
    assert seen.token_ids[0] == tuple(probe.token_ids[0][at] for at in probe.kept)
    assert probe.columns(0, 1020).kept == tuple(at for at in probe.kept if at < 1020)
    assert probe.columns(0, 1020).as_captured() == seen.columns(0, len(probe.columns(0, 1020).kept))


def test_what_is_on_disk_counts_and_what_was_there_before_does_not(tmp_path):
    (tmp_path / "earlier").write_bytes(bytes(500))
    scratch = Scratch.of(tmp_path, 100)
    (tmp_path / "now").write_bytes(bytes(60))
    scratch.require(40, "a run")
    with pytest.raises(NotJudged) as error:
        scratch.require(41, "a run of hf on probe short")
    assert error.value.code == "disk-bound"
    assert "it writes up to 41 bytes, and 60 bytes of 100 bytes are used" in error.value.message
    assert Scratch.of(tmp_path, None) is None


def test_the_plan_says_what_a_bound_leaves_out():
    """Gemma-2 2B within 10 GiB: its text of 4160 tokens stays, with the positions that tell."""
    cost = planned_cost("gemma-2-2b-it", weights=None, probes=None, dtype="float32", disk=10 << 30)
    assert cost.most_disk_bytes <= cost.disk_bound_bytes == 10 << 30
    assert "long" in [one.name for one in cost.probes]
    assert "positions of probe long" in [gap.what for gap in cost.left_out]
