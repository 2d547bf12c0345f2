"""What a change touches, in real git repositories; pins with their lines; matrices; what is asked again."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from parity_audit.core.errors import EnvFailed, NotJudged, UsageError
from parity_audit.core.gate import Case, Status
from parity_audit.gate.cells import cells_of
from parity_audit.gate.changes import changes_since
from parity_audit.gate.pins import pins
from parity_audit.gate.retry import run_with_retries
from parity_audit.specs.places import knob_line

FAMILY = "architecture: (family)\nextends: llama\n"
CHILD = "architecture: LlamaForCausalLM\nextends: _own\nknobs:\n  norm.eps:\n    value: '1e-5'\n"


def git(folder, *args):
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=folder, check=True, capture_output=True
    )


@pytest.fixture
def repository(tmp_path):
    """A commit on main with a family, its child, a spec of its own and a pin; then a branch."""
    specs = tmp_path / "model_specs"
    specs.mkdir()
    (specs / "_own.yaml").write_text(FAMILY)
    (specs / "child.yaml").write_text(CHILD)
    (specs / "other.yaml").write_text(FAMILY)
    (tmp_path / "requirements.txt").write_text("numpy==2.0\ntransformers==5.0.0\nvllm==0.24.0\n")
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "start")
    git(tmp_path, "checkout", "-q", "-b", "branch")
    return tmp_path


def changed(folder, since="main"):
    found = changes_since(since, folder / "model_specs", folder)
    return [path.as_posix() for path in found.specs], [(str(pin.backend), pin.line) for pin in found.pins]


def test_nothing_changed(repository):
    assert changed(repository) == ([], [])


def test_a_family_that_changes_touches_its_children_and_nobody_else(repository):
    (repository / "model_specs" / "_own.yaml").write_text(FAMILY + "sources: [here]\n")
    assert changed(repository) == (["model_specs/child.yaml"], [])


def test_committed_uncommitted_and_untracked_files_count_and_deleted_ones_do_not(repository):
    specs = repository / "model_specs"
    (specs / "child.yaml").write_text(CHILD + "sources: [here]\n")
    git(repository, "commit", "-qam", "changed")
    (specs / "new.yaml").write_text(FAMILY)
    (specs / "other.yaml").unlink()
    (repository / "elsewhere.yaml").write_text(FAMILY)

    assert changed(repository)[0] == ["model_specs/child.yaml", "model_specs/new.yaml"]


def test_what_main_did_meanwhile_is_not_this_branch_s_change(repository):
    git(repository, "commit", "-q", "--allow-empty", "-m", "mine")
    git(repository, "checkout", "-q", "main")
    (repository / "model_specs" / "other.yaml").write_text(FAMILY + "sources: [main]\n")
    git(repository, "commit", "-qam", "theirs")
    git(repository, "checkout", "-q", "branch")

    assert changed(repository) == ([], [])


def test_only_pins_that_are_new_are_tried(repository):
    (repository / "requirements.txt").write_text(
        "# more\nnumpy==2.1\nvllm==0.24.0\ntransformers[torch] == 5.19.0  # up\n"
    )
    assert changed(repository)[1] == [("hf==5.19.0", 4)]


def test_a_commit_that_is_not_there_is_a_clear_error(repository):
    with pytest.raises(UsageError, match="fetch-depth"):
        changed(repository, "origin/nowhere")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("transformer_lens==4.3.0\n", [("transformer_lens==4.3.0", 1)]),
        ('dependencies = [\n  "vllm==0.24.0",\n  "my-transformers==1.0",\n]', [("vllm==0.24.0", 2)]),
        ('[[package]]\nname = "transformers"\nversion = "5.19.0"\n', [("hf==5.19.0", 3)]),
        ('[[package]]\nname = "numpy"\nversion = "2.0"\n\n[[package]]\nversion = "1.0"\n', []),
        ("# transformers==4.0\ntransformers>=5.9\n", []),
    ],
)
def test_pins(text, found):
    assert [(str(pin.backend), pin.line) for pin in pins(text, "f")] == found


def test_the_line_of_a_knob_is_its_own_or_that_of_what_gives_it(tmp_path):
    (tmp_path / "a.yaml").write_text(CHILD)
    assert knob_line(tmp_path / "a.yaml", "norm.eps") == 4
    assert knob_line(tmp_path / "a.yaml", "rope.theta") == 2


def test_a_matrix_is_one_audit_per_model_and_dtype(tmp_path):
    path = tmp_path / "matrix.yaml"
    path.write_text(
        "models: [gpt2, opt-125m]\ndtypes: [float32, bfloat16]\nsynthetic: mini\nprobes: [short]\n"
        'candidates:\n  - "transformer_lens=={2.18.0,4.3.0}"\n  - vllm\n'
    )
    cells = cells_of(path)

    assert [(cell.asked[0].model, cell.asked[0].dtype) for cell in cells] == [
        ("gpt2", "float32"), ("gpt2", "bfloat16"), ("facebook/opt-125m", "float32"), ("facebook/opt-125m", "bfloat16")
    ]  # fmt: skip
    assert [one.candidate for one in cells[0].asked] == ["transformer_lens==2.18.0", "transformer_lens==4.3.0", "vllm"]
    assert {backend: line for backend, (_, line) in cells[0].places} == {
        "transformer_lens==2.18.0": 6, "transformer_lens==4.3.0": 6, "vllm": 7
    }  # fmt: skip
    assert {(one.synthetic, one.probes, one.repair) for cell in cells for one in cell.asked} == {
        ("mini", ("short",), True)
    }


@pytest.mark.parametrize(
    "text", ["models: [gpt2]\n", "candidates: [hf]\n", "models: [gpt2]\ncandidates: [hf]\nmodel: gpt2\n"]
)
def test_a_matrix_that_asks_nothing_or_something_else_is_refused(tmp_path, text):
    path = tmp_path / "matrix.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match="matrix"):
        cells_of(path)


def case(name, status, **more):
    return Case(group="g", name=name, status=status, **more)


def runs(*answers):
    """What each run in turn answers, and how often it was asked."""
    left = list(answers)

    def ask():
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask, left


def seen(cases):
    return [(one.name, one.status) for one in cases]


def test_only_what_the_machine_failed_at_is_asked_again():
    first = [case("a", Status.FAILED), case("b", Status.INFRA, message="no space"), case("c", Status.PASSED)]
    ask, left = runs(first, [case("a", Status.PASSED), case("b", Status.PASSED), case("c", Status.FAILED)])
    found = run_with_retries(ask, group="g", retries=3)

    assert seen(found) == [("a", Status.FAILED), ("c", Status.PASSED), ("b", Status.FLAKE)]
    assert "no space" in found[2].message
    assert left == []


def test_a_mismatch_after_an_infrastructure_failure_is_a_failure():
    ask, _ = runs([case("b", Status.INFRA)], [case("b: norm.eps", Status.FAILED), case("b: rope.theta", Status.FAILED)])
    assert seen(run_with_retries(ask, group="g", retries=1)) == [
        ("b: norm.eps", Status.FAILED),
        ("b: rope.theta", Status.FAILED),
    ]


def test_numbers_are_never_asked_again():
    ask, left = runs([case("a", Status.FAILED)], [case("a", Status.PASSED)])
    assert seen(run_with_retries(ask, group="g", retries=5)) == [("a", Status.FAILED)]
    assert len(left) == 1


def test_what_fails_every_time_stays_infra_and_what_a_program_raises_is_an_error():
    ask, _ = runs(EnvFailed("no wheel"), EnvFailed("no wheel"))
    assert seen(run_with_retries(ask, group="g", retries=1)) == [("audit", Status.INFRA)]
    ask, left = runs(NotJudged("NaN"), [case("a", Status.PASSED)])
    assert seen(run_with_retries(ask, group="g", retries=1)) == [("audit", Status.ERROR)]
    assert len(left) == 1


def test_a_run_that_ended_before_anything_was_judged_is_replaced_whole():
    ask, _ = runs(EnvFailed("no wheel"), [case("a", Status.PASSED), case("b", Status.NOT_TESTED)])
    assert seen(run_with_retries(ask, group="g", retries=1)) == [("a", Status.FLAKE), ("b", Status.NOT_TESTED)]


def test_seconds_are_shared_among_what_was_judged():
    ask, _ = runs([case("a", Status.PASSED), case("b", Status.NOT_TESTED)])
    first, second = run_with_retries(ask, group="g", retries=0)
    assert first.seconds > 0
    assert replace(second, seconds=0.0) == second
