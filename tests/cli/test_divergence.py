"""`parity-audit check-divergence` on files as people have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from parity_audit.cli.app import app

HEAD = "import torch\nimport torch.nn.functional as F\nimport math\n"
RIGHT = """
def loss(student_logits, teacher_logits, beta=0.5):
    s, t = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    m = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
    return beta * F.kl_div(m, t, log_target=True, reduction="sum") + (1 - beta) * F.kl_div(m, s, log_target=True, reduction="sum")
"""
MIXTURE = RIGHT.replace("torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))", "beta * t + (1 - beta) * s")
SWAPPED = RIGHT.replace("return beta *", "return (1 - beta) *").replace("+ (1 - beta) * F", "+ beta * F")


def _run(tmp_path: Path, code: str, name: str = "loss"):
    path = tmp_path / "mine.py"
    path.write_text(HEAD + code)
    return CliRunner().invoke(app, ["check-divergence", f"{path}:{name}"])


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [(RIGHT, 0, "right: the generalized"), (MIXTURE, 1, "log-mixture"), (SWAPPED, 1, "swapped weights")],
)
def test_the_three_variants(code, exit_code, words, tmp_path):
    done = _run(tmp_path, code)
    assert done.exit_code == exit_code, done.output
    assert words in done.output


@pytest.mark.parametrize(
    ("code", "name", "exit_code", "words"),
    [
        (RIGHT, "los", 2, "did you mean `loss`"),
        ("1 / 0", "loss", 3, "ZeroDivisionError"),
        ("def loss(p, q, beta):\n    raise RuntimeError('no')", "loss", 3, "RuntimeError: no"),
    ],
)
def test_what_cannot_be_asked_is_an_error(code, name, exit_code, words, tmp_path):
    done = _run(tmp_path, code, name)
    assert done.exit_code == exit_code
    assert words in done.output


def test_a_missing_file_is_refused():
    assert CliRunner().invoke(app, ["check-divergence", "nowhere.py:loss"]).exit_code == 2
