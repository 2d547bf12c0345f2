"""vLLM's flat tokens find their places again, however its scheduler cuts and orders the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from parity_audit.backends.taps import Recorder
from parity_audit.backends.vllm_engine import cache_bytes, typed
from parity_audit.backends.vllm_gather import COMPUTE_LOGITS, StepGatherer, place, real_rows
from parity_audit.capture.probes import plan_probes
from parity_audit.core.types import Probe, SiteTap
from parity_audit.core.wire import RunRequest

CONFIG = {"vocab_size": 515, "bos_token_id": 2, "max_position_embeddings": 8192}
PROBES = {probe.name: probe for probe in plan_probes(CONFIG)}
SAME = Probe(name="same", purpose="equal rows", token_ids=((2, 9, 9, 9),) * 2, mask=((1, 1, 1, 1), (1, 1, 1, 0)))


def steps(rows: list[list[int]], budget: int, backwards: bool) -> list[tuple[list[int], list[int]]]:
    """(ids, positions) of every step of a scheduler that runs `budget` tokens at a time."""
    order = list(reversed(rows)) if backwards else rows
    flat = [(token, position) for row in order for position, token in enumerate(row)]
    return [tuple(map(list, zip(*flat[at : at + budget], strict=True))) for at in range(0, len(flat), budget)]


@pytest.mark.parametrize(
    ("budget", "backwards"), [(1, False), (7, False), (9, True), (40, True), (1000, False), (1000, True)]
)
@pytest.mark.parametrize("probe", [*PROBES.values(), SAME], ids=lambda probe: probe.name)
def test_every_token_comes_back_to_its_place(probe, budget, backwards, tmp_path):
    """A site that says `1000 * token + position` must read like the probe, whatever the steps were.

    No budget here leaves a row's first token alone at the end of a step that runs backwards: that is refused, see below.
    """
    request = RunRequest(probe=probe, taps=(), out=str(tmp_path))
    recorder = Recorder(request)
    gatherer = StepGatherer(request, recorder)
    for ids, positions in steps(gatherer.rows, budget, backwards):
        gatherer.before_step(torch.nn.Identity(), (torch.tensor(ids), torch.tensor(positions)), {})
        value = 1000.0 * torch.tensor(ids) + torch.tensor(positions)
        gatherer.see(SiteTap(site="x", module=""), value[:, None].expand(-1, 3))
    gatherer.finish(None)

    real = torch.tensor(probe.mask, dtype=torch.bool)
    positions = (real.long().cumsum(-1) - 1).clamp(min=0)
    expected = 1000.0 * torch.tensor(probe.token_ids) + positions
    seen = load_file(tmp_path / probe.name / "x.safetensors")["x"]
    assert torch.equal(seen[real], expected[real][:, None].expand(-1, 3))


@pytest.mark.parametrize("budget", [4, 7, 1000])
def test_tokens_on_another_axis_come_back_to_their_places(budget, tmp_path):
    """Streams `[stream token d]`, four of them, also where a step has four tokens."""
    request = RunRequest(probe=SAME, taps=(), out=str(tmp_path))
    gatherer = StepGatherer(request, Recorder(request))
    tap = SiteTap(site="x", module="", layout="stream b p d -> b p stream d")
    for ids, positions in steps(gatherer.rows, budget, False):
        gatherer.before_step(torch.nn.Identity(), (torch.tensor(ids), torch.tensor(positions)), {})
        value = torch.tensor(ids) + 0.1 * torch.tensor(positions)
        gatherer.see(tap, 1000.0 * torch.arange(4)[:, None, None] + value[None, :, None].expand(-1, -1, 3))
    gatherer.finish(None)

    seen = load_file(tmp_path / SAME.name / "x.safetensors")["x"]
    value = torch.tensor(SAME.token_ids) + 0.1 * torch.arange(4)
    expected = value[:, :, None, None] + 1000.0 * torch.arange(4)[:, None]
    real = torch.tensor(SAME.mask, dtype=torch.bool)
    assert torch.equal(seen[real], expected.expand(-1, -1, -1, 3)[real])


def test_what_has_no_row_for_every_token_hides_its_site(tmp_path):
    """Positions `[1 token]` would fill every row of a site of one row."""
    request = RunRequest(probe=PROBES["short"], taps=(SiteTap(site="x", module=""),), out=str(tmp_path))
    recorder = Recorder(request)
    gatherer = StepGatherer(request, recorder)
    for ids, positions in steps(gatherer.rows, 1000, False):
        gatherer.before_step(torch.nn.Identity(), (torch.tensor(ids), torch.tensor(positions)), {})
        gatherer.see(request.taps[0], torch.tensor(positions)[None])
    gatherer.finish(None)

    assert recorder.reply().entries == ()
    assert [(item.site, item.why) for item in recorder.reply().not_visible] == [
        ("x", "it holds [1, 48] in a step of 48 tokens")
    ]


def test_logits_are_computed_of_the_kept_positions_and_what_was_sampled_from_stands_in_its_place(tmp_path):
    """A head that doubles; the step of 40 tokens ends at 39, which is not kept, the last one at 47, which is."""
    probe = replace(PROBES["short"], kept=(0, 5, 30, 47))
    request = RunRequest(probe=probe, taps=(), out=str(tmp_path), returned=True)
    recorder = Recorder(request)
    gatherer = StepGatherer(request, recorder)
    asked = []

    def head(hidden):
        asked.append(len(hidden))
        return 2 * hidden

    for ids, positions in steps(gatherer.rows, 40, False):
        gatherer.before_step(torch.nn.Identity(), (torch.tensor(ids), torch.tensor(positions)), {})
        hidden = torch.tensor(positions, dtype=torch.float32)[:, None].expand(-1, 3)
        gatherer.see(SiteTap(site="logits", module="", take=COMPUTE_LOGITS), hidden)
        gatherer.sampled_from(2 * hidden[-1:] + 0.5)
    gatherer.finish(head)

    shown = {entry.site: load_file(tmp_path / entry.file)["x"][0, :, 0].tolist() for entry in recorder.reply().entries}
    assert asked == [4]
    assert shown == {"logits": [0.0, 10.0, 60.0, 94.0], "returned": [0.0, 10.0, 60.0, 94.5]}


def test_tokens_that_never_ran_are_an_error(tmp_path):
    request = RunRequest(probe=PROBES["short"], taps=(), out=str(tmp_path))
    gatherer = StepGatherer(request, Recorder(request))
    ids, positions = steps(gatherer.rows, 40, False)[0]
    gatherer.before_step(
        torch.nn.Identity(), (), {"input_ids": torch.tensor(ids), "positions": torch.tensor(positions)}
    )

    with pytest.raises(RuntimeError, match="did not compute 8 of the tokens of probe `short`"):
        gatherer.finish(None)


def test_a_cut_inside_a_shared_prefix_out_of_order_is_refused_and_not_guessed(tmp_path):
    """All rows begin with BOS: run alone and last row first, it could be anybody's."""
    request = RunRequest(probe=PROBES["ragged"], taps=(), out=str(tmp_path))
    gatherer = StepGatherer(request, Recorder(request))
    for ids, positions in steps(gatherer.rows, 1, True):
        gatherer.before_step(torch.nn.Identity(), (torch.tensor(ids), torch.tensor(positions)), {})

    with pytest.raises(RuntimeError, match="did not compute"):
        gatherer.finish(None)


def test_padding_of_a_step_belongs_to_no_row():
    done = [0]
    pieces = place([5, 6, 7, 0, 0], [0, 1, 2, 0, 0], [[5, 6, 7]], done)

    assert [(piece.row, piece.first, piece.start, piece.stop) for piece in pieces] == [(0, 0, 0, 3)]
    assert done == [3]


def test_padding_is_not_sent():
    assert [len(row) for row in real_rows(PROBES["left_padded"])] == [40, 23, 9]
    assert all(row[0] == CONFIG["bos_token_id"] for row in real_rows(PROBES["left_padded"]))


class Config:
    num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim = 4, 4, 2, 256
    query_pre_attn_scalar, attn_logit_softcapping, sliding_window = 256, 50.0, None


def test_whole_numbers_take_the_type_that_the_config_has():
    given = {"query_pre_attn_scalar": 144.0, "attn_logit_softcapping": 30, "sliding_window": 128, "unknown": 1.5}
    done = typed(given, Config())

    assert {key: type(value) for key, value in done.items()} == {
        "query_pre_attn_scalar": int, "attn_logit_softcapping": float, "sliding_window": int, "unknown": float,
    }  # fmt: skip
    assert done == given


def test_the_cache_holds_the_long_probe_and_a_batch():
    per_token = 2 * 4 * 2 * 256 * 4
    assert cache_bytes(Config(), 4161, "float32") == per_token * (33 + 16) * 128


def test_layers_with_heads_of_two_sizes_have_caches_of_two_sizes():
    config = transformers.CONFIG_MAPPING["gemma4_text"](
        num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=32, global_head_dim=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )  # fmt: skip

    assert cache_bytes(config, 128, "float32", rows=0) == 2 * 4 * 2 * (4 * 32 + 2 * 64) * 128
    assert typed({"head_dim": 32.0}, config) == {"head_dim": 32}
