"""An environment that is damaged is found out and made again: real uv, a small engine, an index on this machine."""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import os
import subprocess
import zipfile
from dataclasses import replace

import pytest
from small_index import SmallIndex, serving

from parity_audit.core.errors import BackendFailed, UsageError, WorkerDied
from parity_audit.core.types import BackendRef
from parity_audit.envs import build, heal
from parity_audit.envs.build import Damaged, Environment, damage_of
from parity_audit.envs.recipes import Recipe
from parity_audit.envs.resolve import Resolution

ENGINE = Recipe(
    backend="hf", package="engine", version="1.0", torch="torch", requirements=("engine==1.0",), overrides=(), locked=(),
    python="3.11", device="cpu", check="import engine",
)  # fmt: skip


def recorded(body: bytes) -> bytes:
    """The same wheel with a true RECORD."""
    source, stream = zipfile.ZipFile(io.BytesIO(body)), io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        rows = []
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("RECORD"):
                rows.append(f"{name},,")
                data = "\n".join(rows).encode()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(data)}")
            archive.writestr(name, data)
    return stream.getvalue()


@pytest.fixture
def folder(monkeypatch, tmp_path):
    held = SmallIndex()
    held.add("engine", "1.0", None)
    file = held.files["engine"][0]
    body = held.bodies[str(file["filename"])] = recorded(held.bodies[str(file["filename"])])
    file["hashes"] = {"sha256": hashlib.sha256(body).hexdigest()}
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setattr(build, "resolve", lambda recipe: Resolution(pins=("engine==1.0",), date="", options=()))
    monkeypatch.setattr(heal, "recipe_for", lambda ref, device: ENGINE)
    with serving(held):
        monkeypatch.setenv("UV_DEFAULT_INDEX", held.url)
        yield build.create(ENGINE)


def environment(folder):
    return Environment(python=str(folder / "bin" / "python"), key="", same=False, backend_key="hf", version="1.0")


def module(folder):
    return next(folder.glob("lib/python*/site-packages/engine.py"))


def works(folder):
    try:
        done = subprocess.run(
            [folder / "bin" / "python", "-I", "-c", "import engine; print(engine.version)"], capture_output=True
        )
    except OSError:
        return False
    return done.stdout == b"1.0\n"


def flip(path):
    """Written in place, so that the copy in uv's own cache, which is the same file, is damaged as well."""
    with path.open("r+b") as stream:
        stream.write(b"V")
    os.utime(path, (0, 0))  # else python may believe the bytecode that it wrote in the same second


BROKEN = WorkerDied("it ended")
DAMAGE = {
    "flipped": lambda folder: flip(module(folder)),
    "truncated": lambda folder: os.truncate(module(folder), 5),
    "deleted": lambda folder: module(folder).unlink(),
    "interpreter": lambda folder: [(folder / "bin" / "python").unlink(), (folder / "bin" / "python").write_text("")],
}  # fmt: skip


@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted", "interpreter"])
def test_after_a_failure_a_damaged_environment_is_made_again(folder, damage, caplog):
    DAMAGE[damage](folder)
    assert not works(folder)
    with caplog.at_level(logging.WARNING, "parity_audit"):
        assert heal.rebuild_if_damaged(BROKEN, BackendRef(name="hf"), environment(folder), device="cpu")

    assert works(folder)
    assert damage_of(folder, whole=True) == ""
    assert f"the environment {folder.name} is damaged" in caplog.text


def test_an_intact_environment_is_not_to_blame(folder, caplog):
    before = folder.stat().st_ino

    assert not heal.rebuild_if_damaged(BROKEN, BackendRef(name="hf"), environment(folder), device="cpu")
    assert (folder.stat().st_ino, caplog.text) == (before, "")


@pytest.mark.parametrize("code", sorted(heal.OTHER_CAUSES))
def test_a_failure_that_says_another_cause_is_none_of_the_environments(folder, code, monkeypatch):
    """Comparing every file of an engine with its hash, and importing it once more, takes half a minute."""
    monkeypatch.setattr(heal, "damage_of", lambda *_, **__: pytest.fail("its files were compared"))

    failure = BackendFailed("`enforce_eagr` is not a setting of vLLM", code=code)
    assert not heal.rebuild_if_damaged(failure, BackendRef(name="hf"), environment(folder), device="cpu")


@pytest.mark.parametrize(("damage", "seen"), [("truncated", "has 5 bytes"), ("deleted", "is missing"), ("flipped", "")])
def test_sizes_are_looked_at_before_every_use(folder, damage, seen):
    DAMAGE[damage](folder)

    assert seen in damage_of(folder, whole=False)
    assert "engine.py" in damage_of(folder, whole=True)


def test_two_that_find_the_same_damage_make_it_again_once(folder, caplog):
    seen = Damaged.of(folder, "is missing")
    module(folder).unlink()
    for _ in range(2):
        build.create(ENGINE, damaged=seen)

    assert works(folder)
    assert caplog.text.count("set aside") == 1


def test_a_half_made_one_is_made_again(folder):
    (folder / build.INFO).write_text('{"backend": "h')
    module(folder).unlink()

    assert not build.is_ready(folder)
    assert works(build.create(ENGINE))


def test_one_in_use_is_not_removed(folder):
    lock = heal.use(environment(folder))
    with pytest.raises(UsageError, match="in use"):
        build.remove_env(folder.name)
    assert works(folder)
    lock.release()
    build.remove_env(folder.name)

    assert not folder.exists()


def test_an_interpreter_of_the_users_own_is_left_alone(folder, tmp_path):
    own = replace(environment(folder), python=str(tmp_path / "bin" / "python"))

    assert heal.folder_of(own) is None
    assert not heal.rebuild_if_damaged(BROKEN, BackendRef(name="hf"), own, device="cpu")
