"""What a recorder makes of modules that do not hold what the spec says, and of softmax over more than the keys."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from parity_audit.backends.attention import watched
from parity_audit.backends.taps import Recorder, hooked
from parity_audit.core.types import Probe, SiteTap
from parity_audit.core.wire import RunRequest

PROBE = Probe(name="short", purpose="", token_ids=(tuple(range(6)),), mask=((1,) * 6,))


class Attention(nn.Module):
    """Softmax off by one: a column of zeros takes part and is left out again."""

    def forward(self, q):
        scores = q @ q.transpose(2, 3)
        return torch.cat([scores, torch.zeros_like(scores[..., :1])], -1).softmax(-1)[..., :-1] @ q


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attn, self.norm = nn.Linear(4, 4), Attention(), None

    def forward(self, x):
        return self.attn(self.first(x).view(1, 6, 2, 2).transpose(1, 2))


def recorded(tmp_path, *taps, inputs=None):
    recorder = Recorder(RunRequest(probe=PROBE, taps=taps, out=str(tmp_path), inputs=inputs or {}))
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad(), hooked(model, recorder), watched(model, recorder):
        out = model(torch.randn(1, 6, 4))
    return recorder.reply(), out


def test_a_site_that_is_laid_out_in_another_way_hides_itself_only(tmp_path):
    wrong = SiteTap(site="a", module="first", layout="(b p) d -> b p d")
    reply, _ = recorded(tmp_path, wrong, SiteTap(site="b", module="first"))

    assert [entry.site for entry in reply.entries] == ["b"]
    assert [(item.site, item.why) for item in reply.not_visible] == [
        ("a", "it holds [1, 6, 4] here, which is not `(b p) d`")
    ]


def test_complex_numbers_are_never_cut_to_their_real_part(tmp_path):
    recorder = Recorder(
        RunRequest(probe=PROBE, taps=(SiteTap(site="a", module="first"),), out=str(tmp_path), returned=True)
    )
    recorder.keep("a", torch.ones(1, 6, 4, dtype=torch.complex64))

    assert [(item.site, item.why) for item in recorder.reply().not_visible] == [
        ("a", "it holds complex64 numbers here")
    ]
    with pytest.raises(ValueError, match="returned complex64 numbers"):
        recorder.returns(torch.ones(1, 6, 4, dtype=torch.complex64))


@pytest.mark.parametrize(("shown", "written"), [(torch.arange(3.0), [2.0]), (torch.tensor([7.0]), [7.0])])
def test_of_a_batch_the_asked_row_is_written_and_what_all_rows_share_as_it_is(tmp_path, shown, written):
    """GPT-2 has one row of learned positions for the whole batch."""
    tap, ids = SiteTap(site="a", module=""), ((1,), (2,), (3,))
    probe = Probe(name="short", purpose="", token_ids=ids, mask=((1,),) * 3)
    recorder = Recorder(RunRequest(probe=probe, taps=(tap,), out=str(tmp_path), rows=(2,)))
    recorder.see(tap, shown.reshape(-1, 1, 1))

    assert load_file(tmp_path / "short" / "a.safetensors")["x"].flatten().tolist() == written


@pytest.mark.parametrize("module", ["norm", "nothing"])
def test_a_module_that_is_not_there_hides_its_site_only(tmp_path, module):
    reply, _ = recorded(tmp_path, SiteTap(site="a", module=module), SiteTap(site="b", module="first"))

    assert [entry.site for entry in reply.entries] == ["b"]
    assert [(item.site, item.why) for item in reply.not_visible] == [("a", f"no module `{module}` here")]


def test_a_pattern_is_over_keys_and_goes_back_into_its_place(tmp_path):
    taps = (SiteTap(site="blocks.0.attn_scores", module="attn", take="attention:scores"),
            SiteTap(site="blocks.0.pattern", module="attn", take="attention:pattern"))  # fmt: skip
    reply, out = recorded(tmp_path, *taps)
    held = {entry.site: load_file(tmp_path / entry.file)["x"] for entry in reply.entries}

    assert held["blocks.0.pattern"].shape == held["blocks.0.attn_scores"].shape == (1, 2, 6, 6)
    e = held["blocks.0.attn_scores"].exp()
    assert torch.allclose(held["blocks.0.pattern"], e / (1 + e.sum(-1, keepdim=True)), atol=1e-6)

    path = next(str(tmp_path / entry.file) for entry in reply.entries if entry.site == "blocks.0.pattern")
    _, again = recorded(tmp_path / "again", *taps, inputs={"blocks.0.pattern": path})
    assert torch.equal(out, again)


class TwoSteps(nn.Module):
    """A module whose work is in methods, as that of several streams is, called by its own forward."""

    def predict(self, x):
        return 2.0 * x

    def correct(self, before, made):
        return before + made

    def forward(self, x, *, scale):
        before = self.predict(x)
        return self.correct(before, scale * before)


@pytest.mark.parametrize("replaced", [{}, {"predicted": 1.0}, {"made": 5.0}, {"corrected": 7.0}, {"scale": 0.0}])
def test_methods_and_arguments_by_name_are_seen_and_replaced(tmp_path, replaced):
    whole, model = torch.ones(1, 6, 4), TwoSteps()
    takes = {
        "scale": "input:scale",
        "predicted": "method:predict",
        "made": "method:correct:1",
        "corrected": "method:correct",
    }
    given = {site: tmp_path / f"{site}.safetensors" for site in replaced}
    for site, path in given.items():
        save_file({"x": torch.full((1, 6, 4), replaced[site])}, path)
    taps = tuple(SiteTap(site=site, module="", take=take) for site, take in takes.items())
    recorder = Recorder(
        RunRequest(
            probe=PROBE, taps=taps, out=str(tmp_path / "out"), inputs={site: str(path) for site, path in given.items()}
        )
    )

    with hooked(model, recorder):
        out = model(whole, scale=3.0 * whole)

    predicted = replaced.get("predicted", 2.0)
    made = replaced.get("made", replaced.get("scale", 3.0) * predicted)
    assert torch.equal(out, whole * replaced.get("corrected", predicted + made))
    shown = {
        entry.site: float(load_file(tmp_path / "out" / entry.file)["x"].mean()) for entry in recorder.reply().entries
    }
    computed = replaced.get("scale", 3.0) * predicted
    assert shown == {"scale": 3.0, "predicted": 2.0, "made": computed, "corrected": predicted + made}
    assert vars(model).keys() & {"predict", "correct"} == set()


class Block(nn.Module):
    """A block that is called with its positions by name, as transformers' are."""

    def forward(self, hidden, mask=None, positions=None):
        return hidden + positions[..., None]


@pytest.mark.parametrize(
    ("take", "by_name", "shown"),
    [
        ("input", False, "hidden"), ("input", True, "hidden"), ("input:hidden", False, "hidden"), ("input:2", True, "positions"),
        ("input:positions", False, "positions"), ("input:1", False, None), ("input:1", True, None), ("input:9", True, None),
        ("input:nothing", True, None), ("input_sum:1", True, None),
    ],
)  # fmt: skip
def test_an_argument_is_the_one_that_was_asked_for_or_none(tmp_path, take, by_name, shown):
    """SGLang's Transformers backend gives a block its positions by name: they are not the block's second argument."""
    given = {"hidden": torch.full((1, 6, 6), 5.0), "positions": torch.arange(6.0)[None]}
    recorder = Recorder(RunRequest(probe=PROBE, taps=(SiteTap(site="a", module="", take=take),), out=str(tmp_path)))
    block = Block()
    with hooked(block, recorder):
        block(**given) if by_name else block(given["hidden"], None, given["positions"])
    reply = recorder.reply()

    if shown:
        assert torch.equal(load_file(tmp_path / reply.entries[0].file)["x"], given[shown])
    else:
        assert [(item.site, item.why) for item in reply.not_visible] == [
            ("a", f"`` was called without a tensor at `{take}`")
        ]


class ByHead(nn.Module):
    """Scores by a product over `[batch*head ...]`, as GPT-2's upcasting attention makes them, or by one that nobody follows."""

    def __init__(self, followed):
        super().__init__()
        self.followed, self.first = followed, nn.Linear(4, 4)

    def forward(self, x):
        q = self.first(x).view(1, 6, 2, 2).transpose(1, 2)
        k, scores = (2.0 * q).transpose(2, 3), torch.zeros(2, 6, 6)
        if self.followed:
            scores = torch.baddbmm(scores, q.reshape(2, 6, 2), k.reshape(2, 2, 6), beta=0, alpha=0.5)
        else:
            scores = torch.einsum("bhqd,bhdk->bhqk", q, 0.5 * k)
        return scores.view(1, 2, 6, 6).softmax(-1) @ q


@pytest.mark.parametrize("followed", [True, False])
def test_the_product_behind_a_softmax_is_with_the_values_however_scores_were_made(tmp_path, followed):
    sites = {
        "query": "blocks.0.rot_q",
        "key": "blocks.0.rot_k",
        "scores": "blocks.0.attn_scores",
        "pattern": "blocks.0.pattern",
        "output": "blocks.0.z",
    }
    layout = "batch head pos d -> batch pos head d"
    taps = tuple(
        SiteTap(
            site=site,
            module="",
            take=f"attention:{take}",
            layout="" if site in ("blocks.0.attn_scores", "blocks.0.pattern") else layout,
        )
        for take, site in sites.items()
    )

    def run(out, inputs):
        recorder = Recorder(RunRequest(probe=PROBE, taps=taps, out=str(tmp_path / out), inputs=inputs))
        torch.manual_seed(0)
        model = ByHead(followed)
        with torch.no_grad(), watched(model, recorder):
            made = model(torch.randn(1, 6, 4))
        reply = recorder.reply()
        return made, {entry.site: tmp_path / out / entry.file for entry in reply.entries}, reply

    made, files, reply = run("first", {})
    held = {site: load_file(path)["x"] for site, path in files.items()}
    if followed:
        q = held["blocks.0.rot_q"].transpose(1, 2)
        assert held.keys() == {*sites.values()}
        assert torch.allclose(held["blocks.0.rot_k"], 2.0 * held["blocks.0.rot_q"])
        assert torch.allclose(held["blocks.0.attn_scores"], q @ q.transpose(2, 3), atol=1e-6)
    else:
        assert held.keys() == {"blocks.0.attn_scores", "blocks.0.pattern", "blocks.0.z"}
        assert {item.why for item in reply.not_visible} == {
            "the attention makes its scores by a product that is not followed"
        }
    assert torch.equal(held["blocks.0.z"].transpose(1, 2), made)

    for site in ("blocks.0.rot_q", "blocks.0.attn_scores") if followed else ("blocks.0.attn_scores",):
        save_file({"x": torch.zeros_like(held[site])}, tmp_path / f"{site}.safetensors")
        other, seen, _ = run(f"with {site}", {site: str(tmp_path / f"{site}.safetensors")})
        assert torch.allclose(load_file(seen["blocks.0.pattern"])["x"], torch.full((1, 2, 6, 6), 1 / 6))
        assert not torch.equal(other, made)
