"""What reports say of the weights."""

from parity_audit.core.types import Checkpoint


def test_a_model_of_the_hub_is_named_with_its_commit():
    here = Checkpoint(repo_id="somebody/model", path="/cache/snapshot", fingerprint="ab12", revision="c" * 40)

    assert here.in_reports == {
        "source": "/cache/snapshot", "fingerprint": "ab12", "repo_id": "somebody/model", "revision": "c" * 40,
    }  # fmt: skip


def test_made_up_weights_are_said_to_be_made_up_and_a_directory_has_no_commit():
    assert Checkpoint(repo_id="gpt2", path="/x", synthetic="mini").in_reports["source"] == "synthetic:mini"
    assert "revision" not in Checkpoint(repo_id="gpt2", path="/x").in_reports
