"""Environments hold the dependencies of their engine's day and the torch of their device: real uv, an index on this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_index import SmallIndex, serving, wheel_at_hand

from parity_audit.core.errors import EnvFailed
from parity_audit.core.types import BackendRef
from parity_audit.envs import build
from parity_audit.envs.recipes import Recipe, recipe_for, table
from parity_audit.envs.resolve import Resolution, known_resolution, resolve

ENGINE = Recipe(
    backend="hf", package="engine", version="1.0", torch="torch==2.13.0", requirements=("engine==1.0",),
    overrides=(), locked=(), python="3.11", device="cpu", check="import engine, lib, torch",
)  # fmt: skip
MADE_OF = ("engine==1.0", "lib==1.0", "torch==2.13.0+cpu")


@pytest.fixture
def index(monkeypatch, tmp_path):
    """An engine of March 2024, its dependency before and after, a CUDA torch in the index and a CPU torch at hand."""
    held = SmallIndex()
    held.add("engine", "1.0", "2024-03-01", requires=["lib>=1"])
    held.add("engine", "2.0", "2025-03-01", requires=["lib>=1"])
    held.add("lib", "1.0", "2024-02-01")
    held.add("lib", "2.0", "2024-09-01")
    held.add("torch", "2.13.0", "2026-09-01", requires=["nvidia-cublas"])
    held.add("nvidia-cublas", "13.0", "2026-09-01")
    wheel_at_hand(tmp_path / "wheels", "torch", "2.13.0+cpu")
    for name in (
        "PIP_FIND_LINKS",
        "UV_INDEX_URL",
        "UV_EXTRA_INDEX_URL",
        "UV_INDEX",
        "UV_TORCH_BACKEND",
        "UV_EXCLUDE_NEWER",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with serving(held):
        monkeypatch.setenv("UV_DEFAULT_INDEX", held.url)
        yield held


def test_dependencies_are_of_the_day_of_the_engine_and_torch_is_not(index):
    found = resolve(ENGINE)

    assert found == Resolution(pins=MADE_OF, date="2024-03-03")


def test_another_release_of_the_engine_gets_the_dependencies_of_its_own_day(index):
    later = replace(ENGINE, version="2.0", requirements=("engine==2.0",))

    assert resolve(later).versions["lib"] == "2.0"


def test_an_index_that_names_no_days_gives_its_newest(index):
    for entry in [entry for entries in index.files.values() for entry in entries]:
        entry.pop("upload-time", None)

    assert (resolve(ENGINE).date, resolve(ENGINE).versions["lib"]) == ("", "2.0")


def test_a_resolution_is_asked_for_once_and_then_kept(index):
    first = resolve(ENGINE)
    index.files.clear()

    assert resolve(ENGINE) == known_resolution(ENGINE) == first


def test_a_lock_decides_whatever_the_index_has(index):
    assert resolve(replace(ENGINE, locked=("lib==2.0",))).versions["lib"] == "2.0"


def test_the_cpu_never_gets_a_cuda_build(index, monkeypatch, tmp_path):
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))

    with pytest.raises(EnvFailed, match="no torch built for the cpu can be had"):
        resolve(ENGINE)
    assert known_resolution(ENGINE) is None


def test_cuda_gets_a_cuda_build(index, monkeypatch, tmp_path):
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    versions = resolve(replace(ENGINE, device="cuda")).versions

    assert (versions["torch"], versions["nvidia-cublas"]) == ("2.13.0", "13.0")


def test_a_backend_that_the_user_chose_is_not_questioned(index, monkeypatch, tmp_path):
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_TORCH_BACKEND", "nonsense")

    with pytest.raises(EnvFailed, match="cannot be installed") as caught:
        resolve(ENGINE)
    assert "nonsense" in caught.value.found


def test_a_release_that_the_index_does_not_have_is_said_to_be_that(index):
    with pytest.raises(EnvFailed) as caught:
        resolve(replace(ENGINE, version="7.0", requirements=("engine==7.0",)))
    assert caught.value.message == "engine 7.0 cannot be installed"
    assert "engine==7.0" in caught.value.found


def test_the_folder_of_an_environment_is_named_after_the_versions_in_it(index):
    folder = build.create(ENGINE)

    assert folder == build.environment_of(ENGINE)
    assert folder.name == ENGINE.key_with(MADE_OF)
    assert folder.name != ENGINE.key_with(("engine==1.0", "lib==2.0", "torch==2.13.0+cpu"))
    assert [path.name for path in folder.glob("lib/python3*/site-packages/lib-*")] == ["lib-1.0.dist-info"]


def test_an_environment_that_does_not_start_leaves_nothing_and_is_resolved_again(index):
    broken = replace(ENGINE, check="import no_such_module")

    with pytest.raises(EnvFailed, match="installs but does not start"):
        build.create(broken)
    assert known_resolution(broken) is None
    assert build.environment_of(broken) is None
    assert [path for path in build.envs_root().iterdir() if path.is_dir()] == []


def test_the_recipe_of_a_device_names_it():
    cpu, cuda = (recipe_for(BackendRef(name="transformer_lens", version="3.0.0"), device) for device in ("cpu", "cuda"))

    assert (cpu.device, cuda.device) == ("cpu", "cuda")
    assert cpu.key != cuda.key


@pytest.mark.parametrize("name", ["hf", "transformer_lens", "vllm"])
def test_every_tested_release_has_a_lock_that_names_it_and_no_torch(name):
    for version in table()["backends"][name]["known"]:
        recipe = recipe_for(BackendRef(name=name, version=version))

        assert f"{recipe.package}=={version}" in recipe.locked, version
        assert not [pin for pin in recipe.locked if pin.startswith(("torch==", "nvidia-"))]


def test_an_untested_release_has_no_lock():
    assert recipe_for(BackendRef(name="hf", version="4.44.0")).locked == ()
