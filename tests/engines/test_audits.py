"""Whole audits on real engines: clean ports pass, two historical releases are named, repaired and verified."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from interrupting import obey_ctrl_c

import parity_audit
from parity_audit.core.report import Report, Verdict

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
LLAMA = "meta-llama/Llama-3.2-1B"
AGREE = 2e-5
FORKED = "forked, with parity_audit.backends."
SHORT = ("short", "left_padded")
"""Probes of the tests whose faults show everywhere; a clean Gemma-2 is run on all."""
WITHIN_THE_WINDOW = (
    "short", "repeated", "ragged", "left_padded", "decode", "ids",
    "batch", "decode_batch", "continued", "one", "two", "again",
)  # fmt: skip
"""All but the longest probe, of 8256 tokens in Llama-3.2, which other tests run."""


def audit(tmp_path: Path, model: str, reference: str, *candidates: str, limits: bool = False, **more) -> Report:
    return parity_audit.audit(
        model, reference=reference, candidates=candidates, miniature="mini", out=tmp_path / "out", limits=limits, **more
    )


@pytest.mark.parametrize(("model", "probes"), [("gemma-2-2b-it", None), (LLAMA, WITHIN_THE_WINDOW)])
def test_clean_ports_are_at_parity_without_a_finding(model, probes, tmp_path):
    report = audit(tmp_path, model, "hf", "transformer_lens", "vllm", probes=probes, limits=True)

    assert [candidate.verdict in (Verdict.EXACT, Verdict.PARITY) for candidate in report.candidates] == [True, True]
    assert [candidate.findings for candidate in report.candidates] == [(), ()]
    from_cache = [probe["name"] for probe in report.probes if "cache" in str(probe["purpose"])]
    assert from_cache == ["decode", "decode_batch", "continued"]
    skipped = [gap.what for candidate in report.candidates for gap in candidate.not_tested]
    assert not [what for what in skipped if what.startswith(("probe", "decod", "cached decod"))]
    assert report.exit_code == 0
    assert json.loads((tmp_path / "out" / "report.json").read_text())["exit_code"] == 0


def test_processed_weights_are_judged_up_to_what_they_may_change(tmp_path):
    report = audit(tmp_path, "gpt2", "hf", "transformer_lens,compatibility_mode=true")
    candidate = report.candidates[0]

    assert (candidate.verdict, candidate.findings) == (Verdict.PARITY, ())
    assert any(warning.startswith("weights are processed: fold_ln") for warning in candidate.warnings)
    assert {"ln1.out", "v", "weights, tensor by tensor"} <= {gap.what for gap in candidate.not_tested}


@pytest.fixture(scope="module")
def gemma_2024(tmp_path_factory):
    out = tmp_path_factory.mktemp("gemma")
    sides = "hf==4.43.2,attn_implementation=sdpa", "transformer_lens==2.3.0"
    return audit(out, "gemma-2-2b-it", *sides, probes=("short", "long"))  # the windows show in a long text alone


def findings(report):
    return {finding.knob: finding for finding in report.candidates[0].findings}


def test_gemma_2_in_2024_is_named(gemma_2024):
    found = findings(gemma_2024)

    assert gemma_2024.exit_code == 1
    assert found["attention.scale"].reference_value == pytest.approx(16, rel=1e-4)
    assert found["attention.scale"].candidate_value == pytest.approx(224**0.5, rel=1e-4)
    assert found["attention.scale"].departs_from_spec == "candidate"
    assert found["attention.softcap"].reference_value is None
    assert found["attention.softcap"].candidate_value == pytest.approx(50, rel=1e-3)
    assert found["attention.softcap"].departs_from_spec == "reference"


def test_gemma_2_in_2024_had_its_windows_on_the_wrong_layers(gemma_2024):
    """The release's own table says so: `attn_types` begins with global, and Gemma-2 begins with a window."""
    found = findings(gemma_2024)

    assert found.keys() == {"attention.scale", "attention.softcap", "attention.window"}
    assert found["attention.window"].candidate_value["by_layer"] == {"0": None, "1": 4096, "2": None, "3": 4096}
    assert found["attention.window"].reference_value["by_layer"] == {"0": 4096, "1": None, "2": 4096, "3": None}


def test_gemma_2_in_2024_is_repaired(gemma_2024):
    patched = gemma_2024.candidates[0].patched

    assert patched.verdict is Verdict.PARITY
    assert patched.logits.max_abs <= AGREE
    # The soft-cap is the reference's error: a right reference is proposed, and the candidate is left as it is.
    assert {fix for patch in gemma_2024.candidates[0].patches for fix in patch.fixes} == {
        "attention.scale", "attention.window",
    }  # fmt: skip


def test_every_patch_was_read_back(gemma_2024):
    scale = next(patch for patch in gemma_2024.candidates[0].patches if "attention.scale" in patch.fixes)

    assert {item.after for item in scale.read_back} == {16.0}
    assert {item.path for item in scale.read_back} >= {"cfg.attn_scale", "blocks[0].attn.attn_scale"}


def test_the_printed_patch_works_when_pasted(gemma_2024, tmp_path, gemma):
    """A plain script with that release: load, paste, and the scale of the live module is the reference's."""
    from parity_audit.core.backend_ref import parse_backend
    from parity_audit.envs.build import python_for

    code = "\n".join(patch.code for patch in gemma_2024.candidates[0].patches)
    script = tmp_path / "pasted.py"
    script.write_text(PASTE.format(code=code, config=gemma.path))
    python = python_for(parse_backend("transformer_lens==2.3.0")).python
    environ = {**os.environ, "HF_HOME": gemma.hf_home, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([python, "-I", str(script)], capture_output=True, text=True, env=environ)

    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) <= AGREE


PASTE = """
import json, torch
import transformers
from transformer_lens import HookedTransformer, loading_from_pretrained as tables
original = tables.convert_hf_model_config
config = json.load(open({config!r} + "/config.json"))
def sizes(*args, **kwargs):
    return dict(original(*args, **kwargs), d_model=config["hidden_size"], n_layers=4, n_heads=4, n_key_value_heads=2,
                d_mlp=config["intermediate_size"], d_vocab=config["vocab_size"], attn_types=["global", "local"] * 2)
tables.convert_hf_model_config = sizes
name = "google/gemma-2-2b-it"
model = HookedTransformer.from_pretrained_no_processing(name, device="cpu")
{code}
tokens = torch.arange(8, 136)[None]
hf = transformers.AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager", torch_dtype=torch.float32)
with torch.no_grad():
    print((model(tokens) - hf(tokens).logits).abs().max().item())
"""


def test_against_eager_the_soft_cap_is_no_finding(tmp_path):
    sides = "hf==4.43.2,attn_implementation=eager", "transformer_lens==2.3.0"
    report = audit(tmp_path, "gemma-2-2b-it", *sides, probes=SHORT)

    assert "attention.softcap" not in findings(report)
    assert findings(report)["attention.scale"].candidate_value == pytest.approx(224**0.5, rel=1e-4)
    assert report.candidates[0].patched.verdict is Verdict.PARITY
    assert report.candidates[0].patched.logits.max_abs <= AGREE


def test_llama_3_2_in_2024(tmp_path):
    report = audit(tmp_path, LLAMA, "hf==4.45.2", "transformer_lens==2.8.0", probes=SHORT)
    found = findings(report)

    assert report.exit_code == 1
    assert found.keys() == {"rope.theta", "rope.scaling"}
    assert found["rope.theta"].reference_value == pytest.approx(500000, rel=1e-3)
    assert found["rope.theta"].candidate_value == pytest.approx(10000, rel=1e-3)
    assert found["rope.scaling"].reference_value["factor"] == pytest.approx(32, rel=1e-2)
    assert found["rope.scaling"].candidate_value is None
    assert report.candidates[0].patched.verdict is Verdict.PARITY
    assert report.candidates[0].patched.logits.max_abs <= AGREE
    assert "tables" in report.candidates[0].patches[0].note
    assert report.reference.self_check == ()  # that release cannot change its attention over while it runs


@pytest.mark.parametrize("model", ["allenai/OLMoE-1B-7B-0924", "mistralai/Mixtral-8x7B-v0.1"])
def test_a_mixture_of_transformers_4_is_clean(tmp_path, model):
    """Its gate is a linear module, and the block itself chooses and weighs experts that it keeps in a list."""
    report = audit(tmp_path, model, "hf", "hf==4.45.2", probes=SHORT)
    shown = {delta.site for delta in report.candidates[0].sites}

    assert report.candidates[0].verdict in (Verdict.EXACT, Verdict.PARITY)
    assert findings(report) == {}
    assert {"blocks.0.mlp.router_logits", "blocks.0.mlp_out"} <= shown


def test_sdpa_drops_the_soft_cap_of_gemma_2(tmp_path):
    report = audit(tmp_path, "gemma-2-2b-it", "hf", "hf,attn_implementation=sdpa", probes=SHORT)
    found = findings(report)

    assert found.keys() == {"attention.softcap"}
    assert found["attention.softcap"].candidate_value is None
    assert found["attention.softcap"].reference_value == pytest.approx(50, rel=1e-3)
    assert "eager" in report.candidates[0].patches[0].code
    assert "own sdpa does not compute" in report.reference.self_check[0]
    assert report.candidates[0].patched.verdict in (Verdict.EXACT, Verdict.PARITY)


def test_killing_one_backend_spares_the_other(tmp_path):
    """Kill -9 the vLLM worker: the other result is complete, the report says what died, exit 3, no process is left."""
    command = [
        sys.executable, "-m", "parity_audit", "gemma-2-2b-it", "--miniature", "--out", str(tmp_path), "-c", "transformer_lens",
        "-c", "vllm", "--probe", "short", "--probe", "ragged", "--json",
    ]  # fmt: skip
    printed, said = tmp_path / "printed.json", tmp_path / "said.txt"
    # Files, not pipes: an audit that nobody reads would stop at a full pipe, and never end without its worker.
    with printed.open("w") as stdout, said.open("w") as stderr:
        audit = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True)
        victim = wait_for_worker(FORKED + "vllm", audit)
        os.kill(victim, signal.SIGKILL)
        audit.wait(timeout=600)
    verdicts = {candidate["backend"]: candidate for candidate in json.loads(printed.read_text())["candidates"]}

    assert audit.returncode == 3, said.read_text()
    assert verdicts["transformer_lens"]["verdict"] in ("exact", "parity")
    assert verdicts["transformer_lens"]["logits"] is not None
    assert verdicts["vllm"]["verdict"] == "error"
    assert "SIGKILL" in verdicts["vllm"]["why"]
    assert workers_of(audit.pid) == []


def test_ctrl_c_leaves_no_worker(tmp_path):
    command = [
        sys.executable,
        "-m",
        "parity_audit",
        "gemma-2-2b-it",
        "--miniature",
        "--out",
        str(tmp_path),
        "-c",
        "vllm",
    ]
    audit = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=obey_ctrl_c
    )
    wait_for_worker(FORKED + "hf", audit)
    audit.send_signal(signal.SIGINT)
    _, stderr = audit.communicate(timeout=60)

    assert audit.returncode == 130
    assert "interrupted" in stderr
    assert workers_of(audit.pid) == []


def wait_for_worker(backend: str, parent: subprocess.Popen[str], seconds: float = 900) -> int:
    """The process of a worker, as soon as it has been seen twice: a forked worker may be done in two seconds. A program that a
    server starts has the server's command line until it is executed, and looks like a worker for so long."""
    deadline, seen = time.monotonic() + seconds, []
    while time.monotonic() < deadline and parent.poll() is None:
        before, seen = seen, [pid for pid, label in workers_of(parent.pid) if label == backend]
        if lasting := [pid for pid in seen if pid in before]:
            return lasting[0]
        time.sleep(0.1)
    raise AssertionError(f"no {backend} worker was started")


def workers_of(audit: int) -> list[tuple[int, str]]:
    """(pid, backend) of every worker process that `audit` or a fork server of it started, or that was orphaned; `FORKED`
    and its engine for those of a server, which have its command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode().split("\0")[:-1]
            owner = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if any("worker-" in part and part.endswith(".pyz") for part in command):
            found[int(folder.name)] = (owner, command)
    own = {pid: command[-1] for pid, (owner, command) in found.items() if owner in (audit, 1)}
    return [
        *own.items(),
        *((pid, f"forked, with {command[4]}") for pid, (owner, command) in found.items() if owner in own),
    ]
