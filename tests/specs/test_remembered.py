"""Specs that were read once are read from the cache, and only where nothing changed since."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from parity_audit.specs import load
from parity_audit.specs.remembered import FOLDER, remembered


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A spec and the family that it extends."""
    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path / "cache"))
    for name in ("_sites.yaml", "llama_like.yaml", "llama.yaml"):
        if (load.specs_folder() / name).is_file():
            shutil.copy(load.specs_folder() / name, tmp_path / name)
    return sorted(tmp_path.glob("*.yaml"))


def never():
    raise AssertionError("the YAML was read again")


def test_what_was_read_comes_back_the_same(files):
    read = load._with_models(files)
    assert read
    assert remembered(files, lambda: read) == read
    again = remembered(files, never)
    assert [(spec.file, spec.fingerprint) for spec in again] == [(spec.file, spec.fingerprint) for spec in read]


def test_every_shipped_spec_survives_the_way_through_json(tmp_path, monkeypatch):
    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path))
    files = sorted(load.specs_folder().glob("*.yaml"))
    read = load.list_specs()
    remembered(files, lambda: read)
    assert remembered(files, never) == read


def test_a_changed_family_or_a_damaged_cache_is_read_again(files, tmp_path):
    read = load._with_models(files)
    remembered(files, lambda: read)
    kept = next((tmp_path / "cache" / FOLDER).glob("*.json"))
    kept.write_text(kept.read_text()[:-20])
    assert remembered(files, lambda: read) == read
    files[0].write_text(files[0].read_text() + "\n# changed\n")
    with pytest.raises(AssertionError, match="read again"):
        remembered(files, never)


def test_a_cache_that_cannot_be_written_stops_nothing(files, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path / "file"))
    read = load._with_models(files)
    assert remembered(files, lambda: read) == read
    assert Path(read[0].file).parent == tmp_path
