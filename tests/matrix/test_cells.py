"""Which cells a matrix has: braces, files, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from parity_audit.core.errors import UsageError
from parity_audit.matrix.cells import Matrix, cells, expanded, read_matrix
from parity_audit.specs.load import list_specs

COMMITTED = Path(__file__).resolve().parents[2] / "reports" / "matrix.yaml"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("vllm", ["vllm"]),
        ("transformer_lens=={2.18.0, 4.3.0}", ["transformer_lens==2.18.0", "transformer_lens==4.3.0"]),
        ("hf=={1,2},dtype={a,b}", ["hf==1,dtype=a", "hf==1,dtype=b", "hf==2,dtype=a", "hf==2,dtype=b"]),
        ('hf,rope={"a": 1, "b": 2}', ['hf,rope={"a": 1, "b": 2}']),
    ],
)
def test_braces_are_expanded_and_objects_are_not(text, wanted):
    assert expanded(text) == wanted


def test_a_matrix_is_every_model_with_every_candidate_once():
    asked = cells(Matrix(models=("gpt2", "openai-community/gpt2"), candidates=("vllm", "hf=={5.0.0,5.19.0}", "vllm")))

    assert [one.candidate for one in asked] == ["vllm", "hf==5.0.0", "hf==5.19.0"]
    assert {one.model for one in asked} == {"gpt2"}


def test_all_is_one_model_of_every_architecture():
    asked = cells(Matrix(models=("all",), candidates=("vllm",)))

    assert len(asked) == sum(bool(spec.content.models) for spec in list_specs()) >= 24


@pytest.mark.parametrize(
    "spoilt",
    [
        Matrix(models=(), candidates=("vllm",)),
        Matrix(models=("gpt2",), candidates=()),
        Matrix(models=("gpt2",), candidates=("vlm",)),
        Matrix(models=("no-such-model-anywhere-\n",), candidates=("vllm",)),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(spoilt):
    with pytest.raises(UsageError):
        cells(spoilt)


def test_the_committed_file_asks_for_every_architecture():
    asked = cells(read_matrix(COMMITTED))
    architectures = {spec.architecture for spec in list_specs() for one in asked if one.model in spec.content.models}

    assert architectures == {spec.architecture for spec in list_specs()}
    assert {one.probes for one in asked} == {("short",)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models: [gpt2]\ncandidates: [vllm]\nmodel: x\n", "`model` is not a key"),
        ("models: gpt2\ncandidates: [vllm]\n", "`models` is not a list"),
        ("models: [gpt2]\n", "needs `models` and `candidates`"),
        ("models: [gpt2]\ncandidates: [vllm]\nseed: [1]\n", "`seed` is not one value"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, text, says):
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(UsageError, match=says):
        read_matrix(tmp_path / "m.yaml")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match="no matrix file"):
        read_matrix(tmp_path / "none.yaml")
