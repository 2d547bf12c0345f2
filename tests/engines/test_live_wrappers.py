"""Loaded models in what wraps them: adapters of PEFT, nnsight's tracing. Both are installed beside parity-audit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stacks import ROOT, installed, ran

pytestmark = pytest.mark.engine
AUDITS = """
import copy, json, sys
import nnsight, peft, torch, transformers
import parity_audit

path = sys.argv[1]
said = {}

def load():
    return transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")

def ask(what, model, weights=path):
    report = parity_audit.audit_live(
        model, "meta-llama/Llama-3.2-1B", weights=weights, probes="short", out=f"out-{what}", repair=False, limits=False
    )
    candidate = report.candidates[0]
    said[what] = [candidate.verdict.value, sorted({finding.knob for finding in candidate.findings})]

adapted = peft.get_peft_model(load(), peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4))
torch.manual_seed(0)
for name, parameter in adapted.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter, std=0.05)
copy.deepcopy(adapted).merge_and_unload().save_pretrained("merged")
ask("adapters, against what they were merged into", adapted, "merged")
ask("adapters, against the base", adapted)
dora = peft.get_peft_model(load(), peft.LoraConfig(target_modules=["q_proj"], r=4, use_dora=True))
for name, parameter in dora.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter, std=0.05)
copy.deepcopy(dora).merge_and_unload().save_pretrained("merged-dora")
ask("adapters that do more than add, against what they were merged into", dora, "merged-dora")
with adapted.disable_adapter():
    ask("adapters switched off", adapted)
language = nnsight.LanguageModel(load(), tokenizer=transformers.AutoTokenizer.from_pretrained(path))
ask("nnsight", language)
for layer in language._module.model.layers:
    layer.self_attn.scaling *= 1.05
ask("nnsight, another scale", language)
ask("NNsight", nnsight.NNsight(load()))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with PEFT and nnsight beside the releases that parity-audit was tested with."""
    home = tmp_path_factory.mktemp("wrappers") / "env"
    return installed(home, ROOT / "constraints.txt", "peft==0.21.2", "nnsight==0.8.1")


def test_the_model_inside_is_audited_with_its_adapters(python, llama, tmp_path):
    done = ran(python, tmp_path, "-c", AUDITS, llama.path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])

    assert said["adapters, against what they were merged into"] == ["parity", []]
    assert said["adapters that do more than add, against what they were merged into"] == ["parity", []]
    assert said["adapters, against the base"][0] == "mismatch"
    assert said["adapters, against the base"][1] == ["weights.attn.q", "weights.mlp.down"]
    assert said["adapters switched off"] == ["exact", []]
    assert said["nnsight"] == ["exact", []]
    assert said["nnsight, another scale"] == ["mismatch", ["attention.scale"]]
    assert said["NNsight"] == ["exact", []]
