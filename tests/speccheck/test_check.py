"""`spec check` on real engines: a right spec is green, a wrong constant or site is not, and says which."""

import json
from types import SimpleNamespace

import pytest
import transformers
from own_specs import LLAMA_PORT
from typer.testing import CliRunner

from parity_audit.cli.app import app
from parity_audit.core.errors import UsageError
from parity_audit.speccheck import nearest as nearest_module
from parity_audit.speccheck.check import FAILED, KNOWN, NOT_RUN, OK, PairCheck, SpecCheck, judged
from parity_audit.speccheck.draft import draft_spec
from parity_audit.speccheck.mutate import changes
from parity_audit.speccheck.table import page
from parity_audit.specs.load import load_spec
from parity_audit.specs.resolve import resolve_model


def checked(*args, tmp_path):
    out = tmp_path / "check.json"
    done = CliRunner().invoke(
        app, ["spec", "check", *map(str, args), "-b", "transformer_lens", "-q", "--out", str(out)]
    )
    return done.exit_code, json.loads(out.read_text()) if out.is_file() else done.output


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setenv("PARITY_AUDIT_SPECS", "")

    def write(more=""):
        file = tmp_path / "own.yaml"
        file.write_text(LLAMA_PORT.format(architecture="LlamaForCausalLM") + more)
        return file

    return write


def test_a_right_spec_of_ones_own_is_green(written, tmp_path):
    code, (result,) = checked(written(), tmp_path=tmp_path)

    assert (code, result["ok"], result["model"]) == (0, True, "somebody/port")
    assert [pair["status"] for pair in result["pairs"]] == [OK, OK]
    assert result["pairs"][1]["verdict"] in ("exact", "parity")


def test_a_wrong_constant_is_what_the_reference_contradicts(written, tmp_path):
    code, (result,) = checked(written("knobs:\n  attention.scale: {value: 'sqrt(d_head) * 1.1'}\n"), tmp_path=tmp_path)

    assert (code, result["ok"]) == (1, False)
    assert "attention.scale" in result["pairs"][0]["why"]


def test_an_error_that_the_spec_knows_of_is_green_and_named(tmp_path):
    code, (result,) = checked("opt", tmp_path=tmp_path)
    bridge = result["pairs"][1]

    assert (code, result["ok"], bridge["status"], bridge["verdict"]) == (0, True, KNOWN, "mismatch")
    assert bridge["why"].startswith("attn.hook_attn_scores shows pattern")
    assert bridge["why"].endswith("it holds the pattern here, what the softmax made of the scores")


def test_what_the_reference_says_of_itself_is_not_asked_of_a_candidate(tmp_path):
    out = tmp_path / "check.json"
    assert CliRunner().invoke(app, ["spec", "check", "gemma2", "-b", "hf", "-q", "--out", str(out)]).exit_code == 0
    (result,) = json.loads(out.read_text())

    assert [pair["status"] for pair in result["pairs"]] == [KNOWN, OK]
    assert result["pairs"][1]["verdict"] in ("exact", "parity")
    assert "has no soft-cap" in result["pairs"][0]["why"]


def test_a_known_error_that_is_gone_is_red(written, tmp_path):
    more = "backends:\n  transformer_bridge:\n    known: {mlp.activation: its table says gelu}\n"
    code, (result,) = checked(written(more), tmp_path=tmp_path)

    assert (code, result["ok"], result["pairs"][1]["status"]) == (1, False, FAILED)
    assert result["pairs"][1]["why"] == "known, but not found: mlp.activation"


KNOW = {"a": "because", "b": "therefore"}


@pytest.mark.parametrize(
    ("seen", "known", "agrees", "expected"),
    [
        ({}, {}, True, (OK, "")),
        ({}, {}, False, (FAILED, "off")),
        ({"a": "A", "b": "B"}, KNOW, False, (KNOWN, "A: because; B: therefore")),
        ({"a": "A"}, KNOW, False, (FAILED, "known, but not found: b; off; A")),
        ({"a": "A", "b": "B", "c": "C"}, KNOW, False, (FAILED, "off; A; B; C")),
        ({}, KNOW, True, (FAILED, "known, but not found: a, b")),
        ({"c": "C"}, {}, False, (FAILED, "off; C")),
    ],
)
def test_only_what_the_spec_lists_is_known(seen, known, agrees, expected):
    assert judged(seen, known, agrees=agrees, said="off") == expected


def test_a_release_that_cannot_run_it_is_not_run(tmp_path):
    out = tmp_path / "check.json"
    command = ["spec", "check", "olmo2", "-b", "transformer_lens==2.18.0", "-q", "--no-install", "--out", str(out)]
    assert CliRunner().invoke(app, command).exit_code == 0
    (result,) = json.loads(out.read_text())
    assert [(pair["backend"], pair["status"]) for pair in result["pairs"] if pair["why"]] == [
        ("transformer_lens==2.18.0", NOT_RUN)
    ]


def test_a_broken_file_is_an_error_with_its_line(written, tmp_path):
    code, said = checked(written("nobs: {}\n"), tmp_path=tmp_path)
    assert code == 2
    assert "own.yaml:" in said


def test_the_page_lists_every_pair_and_escapes_foreign_text():
    pairs = [
        PairCheck(architecture="A", model="m", backend="hf", version="5", status=OK, verdict="parity"),
        PairCheck(architecture="A", model="m", backend="vllm", version="", status=NOT_RUN, why="<b>no</b> | kernel"),
    ]
    shown = page([SpecCheck(spec="a", architecture="A", model="m", pairs=tuple(pairs))])

    assert "| A | `a` | hf 5 | parity |  |" in shown
    assert "\\<b\\>no\\</b\\> \\| kernel" in shown


def test_a_spec_that_ran_nowhere_is_not_green():
    pair = PairCheck(architecture="A", model="m", backend="vllm", version="", status=NOT_RUN)
    assert not SpecCheck(spec="a", architecture="A", model="m", pairs=(pair,)).ok
    assert not SpecCheck(spec="a", architecture="A", model="m", pairs=()).ok


UNSEEN = {
    "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False,
    "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 27648, "max_position_embeddings": 4096, "mlp_bias": False, "num_attention_heads": 80,
    "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 10000000.0,
    "tie_word_embeddings": False, "vocab_size": 155136,
}  # fmt: skip


def test_a_draft_of_an_unseen_architecture_passes_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PARITY_AUDIT_SPECS", "")
    (tmp_path / "config.json").write_text(json.dumps(UNSEEN))
    out = tmp_path / "seed_oss.yaml"
    command = ["spec", "new", str(tmp_path), "--id", "somebody/seed", "--out", str(out)]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert CliRunner().invoke(app, command).exit_code == 2  # nothing is overwritten

    code, (result,) = checked(out, tmp_path=tmp_path)
    assert (code, result["ok"], result["architecture"]) == (0, True, "SeedOssForCausalLM")


def looked_at(config):
    """The names in backticks of what a draft leaves to a person."""
    return [line.split("`")[1] for line in draft_spec("somebody/seed", config).todo]


def test_what_plays_a_role_in_some_layers_alone_is_not_left_to_a_person():
    """Three layers of four of this model have no attention: their output projection has a name of its own."""
    config = resolve_model("qwen3-next").config | {"num_hidden_layers": 4, "num_experts": 4, "vocab_size": 515}
    said = " ".join(draft_spec("somebody/hybrid", {**config, "layer_types": None}).todo)

    assert "linear_attn.in_proj" not in said
    assert "out_proj" not in said
    assert "self_attn" not in said
    assert "rope" not in said


def test_what_a_draft_cannot_see_is_marked():
    draft = draft_spec("somebody/seed", {**UNSEEN, "logit_scale": 0.5})
    assert draft.todo == ("config key `logit_scale` (0.5) is read by no constant: does it change what is computed?",)
    assert "# TODO config key `logit_scale`" in draft.text
    assert looked_at({**UNSEEN, "no_rope_layer_interval": 4}) == ["no_rope_layer_interval"]
    assert looked_at({**UNSEEN, "use_qk_norm": True, "use_cla": False}) == ["use_qk_norm"]


def known_to(monkeypatch, *names):
    """Leave only these specs, as if the others had never been written."""
    monkeypatch.setattr(nearest_module, "list_specs", lambda: tuple(load_spec(name) for name in names))


SMALL = {"num_hidden_layers": 4, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 515, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("kind", "parent", "seen"),
    [
        ("olmo3", "olmo2", {"layer_types", "sliding_window"}),
        ("exaone4", "olmo2", {"layer_types", "sliding_window", "sliding_window_pattern"}),
        (
            "qwen2_moe",
            "qwen3_moe",
            {"model.layers.{l}.mlp.shared_expert_gate.weight", "shared_expert_intermediate_size"},
        ),
        ("glm4", "llama_like", {"model.layers.{l}.post_mlp_layernorm.weight", "model.layers.{l}.post_mlp_layernorm"}),
    ],
)
def test_the_nearest_family_is_extended_and_what_it_does_not_use_is_listed(monkeypatch, kind, parent, seen):
    known_to(monkeypatch, "llama", "olmo2", "qwen3", "qwen3_moe", "mixtral", "gemma2")
    config = transformers.CONFIG_MAPPING[kind](**SMALL).to_dict()
    config = {key: value for key, value in config.items() if value is not None} | {"architectures": ["X"]}

    assert draft_spec("somebody/new", config).extends == parent
    assert seen <= set(looked_at(config))


@pytest.mark.parametrize(("kind", "gate"), [("glm4", "gate_up_proj"), ("arcee", "up_proj")])
def test_an_mlp_of_another_shape_is_written_out(monkeypatch, tmp_path, kind, gate):
    """The shipped specs of both were written by hand: their sites and roles are the same."""
    known_to(monkeypatch, "llama")
    config = transformers.CONFIG_MAPPING[kind](**SMALL).to_dict()
    config = {key: value for key, value in config.items() if value is not None} | {"architectures": ["X"]}
    draft = draft_spec("somebody/new", config)
    (tmp_path / "own.yaml").write_text(draft.text)
    made, shipped = load_spec(tmp_path / "own.yaml").content, load_spec(kind).content

    assert not [line for line in draft.todo if gate in line or "gate_proj" in line]
    for backend in ("hf", "transformer_bridge", "vllm"):
        for site in ("blocks.{l}.mlp.pre", "blocks.{l}.mlp.pre_linear"):
            assert made.backends[backend].sites.get(site) == shipped.backends[backend].sites.get(site)
    assert (made.roles["mlp.gate"], made.roles["mlp.up"]) == (shipped.roles["mlp.gate"], shipped.roles["mlp.up"])


def test_a_model_without_attention_is_refused():
    with pytest.raises(UsageError, match="`mamba` has no attention"):
        draft_spec("somebody/x", {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 64})


def test_a_model_type_that_transformers_does_not_have_is_an_error():
    with pytest.raises(UsageError, match="cannot build model type"):
        draft_spec("somebody/x", {"architectures": ["X"], "model_type": "no_such"})


@pytest.mark.parametrize(("rotated", "others"), [(96, ["94"]), (32, ["30", "none"])])
def test_a_constant_is_only_changed_to_what_computes_something_else(rotated, others):
    """Phi-3 rotates all 96 components of a head, which is what no constant at all means."""
    values = {"rope.partial": [rotated, rotated]}
    residuals = SimpleNamespace(decoder=SimpleNamespace(values=values, dims={"d_head": 96}))

    assert [change.partition(" -> ")[2] for change, _ in changes(residuals, "rope.partial")] == others


def test_parts_of_a_scaling_that_its_kind_does_not_read_are_not_changed():
    """Hunyuan's `alpha` decides alone; YaRN's slow end falls on the same pair where a tenth does not reach the next."""
    alpha = {
        "rope_type": "dynamic",
        "alpha": 1000.0,
        "factor": 1.0,
        "beta_fast": 32,
        "original_max_position_embeddings": 4096,
    }
    yarn = {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 8192,
    }

    def changed(scaling):
        values = {"rope.scaling": [scaling], "rope.theta": [5e5]}
        residuals = SimpleNamespace(decoder=SimpleNamespace(values=values, dims={"d_head": 128}))
        return {change.partition(" -> ")[2].split()[0] for change, _ in changes(residuals, "rope.scaling")}

    assert changed(alpha) == {"alpha", "none"}
    assert changed(yarn) == {"factor", "beta_fast", "original_max_position_embeddings", "none"}


@pytest.mark.engine
def test_every_changed_constant_of_a_spec_is_contradicted_by_name(tmp_path):
    """OLMo 3 has a YaRN scaling, which no search for one number finds where a spec has none."""
    out = tmp_path / "mutated.json"
    done = CliRunner().invoke(app, ["spec", "check", "llama", "olmo3", "--mutate", "-q", "--out", str(out)])
    found = json.loads(out.read_text())

    assert done.exit_code == 0, done.output
    assert {name: len(every) >= 15 for name, every in found.items()} == {"llama": True, "olmo3": True}
    assert [one for every in found.values() for one in every if not one["named"]] == []
    assert {one["knob"] for one in found["llama"]} >= {
        "attention.scale",
        "norm.eps",
        "rope.theta",
        "rope.scaling",
        "mlp.activation",
    }
