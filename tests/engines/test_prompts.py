"""Fifty texts of a user's own and a chat: the model is compared on them, and what is wrong with a port's tokenizer is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import parity_audit
from parity_audit.core.report import Verdict

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
PORTS = Path(__file__).parents[1] / "ports" / "own_tokenizers.py"
SAID = {
    "right": "",
    "double_bos": "BOS (2) stands twice at the start",
    "missing_bos": "BOS (2) is missing at the start",
    "shifted": "are shifted by +1 (added tokens at other ids)",
    "templated": "the chat template adds 2 tokens before and 1 behind the same text",
    "other_template": "",
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def found(tmp_path_factory, llama):
    folder = tmp_path_factory.mktemp("prompts")
    shutil.copytree(llama.path, folder / "weights")
    settings = folder / "weights" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    rows = [{"text": f"Token {n} of the quick brown fox, position {n * n}"} for n in range(50)]
    chat = {"messages": [{"role": "user", "content": "What does the residual stream hold?"}]}
    (folder / "texts.jsonl").write_text("\n".join(json.dumps(row) for row in [*rows, chat]))
    report = parity_audit.audit(
        "meta-llama/Llama-3.2-1B", candidates=[f"python:{PORTS}:{name}" for name in SAID], weights=folder / "weights",
        probes=["short"], prompts=folder / "texts.jsonl", repair=False, out=folder / "out", limits=False,
    )  # fmt: skip
    return report, dict(zip(SAID, report.candidates, strict=True))


def test_every_text_is_a_row_of_a_probe(found):
    report, _ = found
    rows = [probe for probe in report.probes if str(probe["name"]).startswith("prompts")]

    assert len(rows) == 7
    assert sum(probe["shape"][0] for probe in rows) == 51


@pytest.mark.parametrize("name", SAID)
def test_a_wrong_tokenizer_is_named_and_the_model_is_not_accused(found, name):
    candidate = found[1][name]
    told = [line for line in candidate.warnings if "50 of 50 texts" in line or "50 of 51 texts" in line]

    assert candidate.verdict is Verdict.EXACT
    assert len(told) == bool(SAID[name])
    assert all(SAID[name] in line for line in told)
    assert ("its tokenizer departs in" in candidate.why) is (name != "right")


def test_a_tokenizer_without_a_template_is_listed(found):
    gaps = [gap for gap in found[1]["right"].not_tested if gap.what == "chat template"]

    assert [gap.why for gap in gaps] == [
        "python shows none here, so that chat messages (1 of the prompts) were not compared"
    ]


def test_another_chat_template_is_named(found):
    (told,) = [line for line in found[1]["other_template"].warnings if "tokenises" in line]

    assert "the chat template puts" in told
    assert "the reference's" in told
