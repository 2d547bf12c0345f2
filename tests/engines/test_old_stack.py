"""parity-audit installed into an environment of 2024, as its users have them: configs are read as here, live models are audited.

The environment holds the releases of TransformerLens 2.3.0's day: transformers 4.43, huggingface-hub 0.24, rich 13.7.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stacks import ROOT, installed, ran

from parity_audit.specs.load import list_specs
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.view import dims, spec_values

pytestmark = pytest.mark.engine
LOCK = ROOT / "parity_audit" / "envs" / "locks" / "transformer-lens-2.3.0.txt"
SAVED = ROOT / "tests" / "specs" / "saved_configs"
CONSTANTS = """
import json, sys
from parity_audit.specs.installed import lacks
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.view import dims, spec_values
found = {}
for key, (name, config) in json.load(sys.stdin).items():
    model = resolve_model(name)
    found[key] = None if lacks(config) else [spec_values(model.spec, config), dims(model.spec, config)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of that environment."""
    home = tmp_path_factory.mktemp("stack-of-2024") / "env"
    return installed(home, LOCK, "transformer-lens==2.3.0", "torch==2.13.0", "pandas")


def test_configs_are_read_as_with_the_newest_transformers(python, tmp_path):
    """Every released config, and what three releases of transformers saved of them; None where it has no such model type."""
    asked = {name: (name, resolve_model(name).config) for spec in list_specs() for name in spec.content.models}
    for path in SAVED.glob("*.json"):
        asked |= {f"{path.stem} {name}": (name, config) for name, config in json.loads(path.read_text()).items()}
    done = ran(python, tmp_path, "-c", CONSTANTS, given=json.dumps(asked))
    assert done.returncode == 0, done.stderr
    found = {key: value for key, value in json.loads(done.stdout).items() if value is not None}

    assert len(found) > 80
    assert {
        "google/gemma-2-27b",
        "Qwen/Qwen2.5-7B",
        "Qwen/Qwen1.5-MoE-A2.7B",
        "transformers-5.0.0 gpt2",
    } <= found.keys()
    for key, value in found.items():
        name, config = asked[key]
        spec = resolve_model(name).spec
        assert value == json.loads(json.dumps([spec_values(spec, config), dims(spec, config)])), key


def test_an_architecture_that_is_younger_than_its_transformers_is_refused(python, tmp_path):
    done = ran(python, tmp_path, "-m", "parity_audit", "granite-3.0-2b-base", "--miniature", "--quick")

    assert done.returncode == 2
    assert (
        "error[model-type-not-installed]: transformers 4.43.3, which this interpreter has, knows no model type `granite`"
        in done.stderr
    )


def test_a_name_that_nobody_knows_is_refused_with_its_hub_library(python, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = ran(python, tmp_path, "-m", "parity_audit", "google/gemma-2-2b-itt", "--quick")

    assert done.returncode == 2
    assert "error[unknown-model]" in done.stderr
    assert "google/gemma-2-2b-it" in done.stderr


def test_the_notebook_of_live_models_says_the_same_today(python, tmp_path):
    """Its cells, run again: the fault of that release in a HookedTransformer, repaired by the printed patch; transformers exact."""
    cells = json.loads((ROOT / "docs" / "live.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    last = "print(json.dumps([[f.knob, f.candidate_value, f.spec_value] for f in report.candidates[0].findings]))"
    done = ran(python, tmp_path, "-c", "\n".join(["import json", *code, last]))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()

    assert [[knob, round(value, 4), spec] for knob, value, spec in json.loads(lines[-1])] == [
        ["attention.scale", round(224**0.5, 4), 16.0]
    ]
    assert lines[-3].startswith("parity - ")
    assert lines[-2].startswith("exact - ")
