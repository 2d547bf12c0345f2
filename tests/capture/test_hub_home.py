"""Hub caches that forked workers share."""

import shutil
import subprocess
import sys

import pytest

from parity_audit.cache.root import cache_root
from parity_audit.capture import hub_home
from parity_audit.capture.workspace import reclaim


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Makes a hub cache with one repository, in which one file says `content`."""
    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path / "cache"))

    def make(repo, content):
        home = tmp_path / content
        repository = home / "hub" / f"models--{repo}"
        repository.mkdir(parents=True)
        (repository / "config.json").write_text(content)
        return home

    yield make
    hub_home._drop()


def seen(home, repo):
    return (home / "hub" / f"models--{repo}" / "config.json").read_text()


def test_checkpoints_of_several_names_share_one(checkpoint):
    one = hub_home.shared_home(checkpoint("gpt2", "one"))
    two = hub_home.shared_home(checkpoint("opt", "two"))
    assert one == two
    assert (seen(one, "gpt2"), seen(one, "opt")) == ("one", "two")


def test_two_checkpoints_of_one_name_are_not_mixed_up(checkpoint):
    first, second = checkpoint("gpt2", "first"), checkpoint("gpt2", "second")
    one, two = hub_home.shared_home(first), hub_home.shared_home(second)
    assert (seen(one, "gpt2"), seen(two, "gpt2")) == ("first", "second")
    assert hub_home.shared_home(first) == one != two == hub_home.shared_home(second)


def test_a_name_is_free_again_when_its_checkpoint_is_gone(checkpoint):
    first = checkpoint("gpt2", "first")
    one = hub_home.shared_home(first)
    shutil.rmtree(first)
    assert hub_home.shared_home(checkpoint("gpt2", "second")) == one
    assert seen(one, "gpt2") == "second"


def test_a_disk_without_links_shares_nothing(checkpoint, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("no symbolic links here")

    own = checkpoint("gpt2", "one")
    monkeypatch.setattr("pathlib.Path.symlink_to", refuse)
    assert hub_home.shared_home(own) == own


def test_another_audit_leaves_it_alone_and_it_goes_with_its_process(checkpoint):
    home = hub_home.shared_home(checkpoint("gpt2", "one"))
    reclaim(cache_root())
    assert seen(home, "gpt2") == "one"

    other = checkpoint("gpt2", "other")
    script = f"from parity_audit.capture.hub_home import Path, shared_home; print(shared_home(Path({str(other)!r})))"
    asked = [sys.executable, "-c", script]
    others = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    assert others != str(home)
    assert sorted(folder.name for folder in home.parent.iterdir()) == [home.name]
