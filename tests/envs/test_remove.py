"""`envs remove` takes the name of an environment: a path, however it is written, deletes nothing."""

from __future__ import annotations

import pytest

from parity_audit.core.errors import UsageError
from parity_audit.envs.build import remove_env

NAME = "transformers-4.45.2-0123456789ab"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path / "cache"))
    for folder in (f"envs/{NAME}/bin", "captures/kept"):
        (tmp_path / "cache" / folder).mkdir(parents=True)
    (tmp_path / "cache" / "envs" / "link").symlink_to(tmp_path / "cache" / "captures")
    return tmp_path / "cache"


@pytest.mark.parametrize(
    "key", ["..", ".", "", "/", "../captures", "link", f"../envs/{NAME}", f"{NAME}/bin", f"{NAME}/"]
)
def test_what_is_no_name_deletes_nothing(cache, key):
    before = sorted(cache.rglob("*"))

    for wrong in (key, str(cache / "envs" / NAME)):
        with pytest.raises(UsageError, match="no environment") as caught:
            remove_env(wrong)
        assert caught.value.code == "unknown-env"
    assert sorted(cache.rglob("*")) == before


def test_the_nearest_name_is_suggested(cache):
    with pytest.raises(UsageError) as caught:
        remove_env("transformers-4.45.2")

    assert caught.value.hint == f"did you mean `{NAME}`?"


def test_a_name_deletes_that_environment_alone(cache):
    remove_env(NAME)

    assert not (cache / "envs" / NAME).exists()
    assert (cache / "captures" / "kept").is_dir()
