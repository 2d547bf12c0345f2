"""Rollout files of each framework, the same three sampled tokens in every layout, and broken files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from parity_audit.core.errors import NotJudged, UsageError
from parity_audit.logprobs.files.rollouts import read_rollouts
from parity_audit.logprobs.files.writing import write_tokens
from parity_audit.logprobs.metrics import METRICS
from parity_audit.logprobs.paired import paired
from parity_audit.logprobs.profiles import PROFILES
from parity_audit.logprobs.reporting import token_table

A, B = [-1.0, -2.0, -3.0], [-1.1, -1.9, -3.2]
PROMPT, TOKENS = [5, 6], [7, 8, 2]
ROWS: dict[str, dict[str, Any]] = {
    "parity-audit": {"prompt_ids": PROMPT, "token_ids": TOKENS, "rollout_logprobs": A, "train_logprobs": B},
    "trl": {
        "prompt_ids": [0, *PROMPT], "prompt_mask": [0, 1, 1], "completion_ids": [*TOKENS, 0], "completion_mask": [1, 1, 1, 0],
        "sampling_per_token_logps": [*A, 0.0], "old_per_token_logps": [*B, 0.0],
    },
    "verl": {
        "prompts": [0, *PROMPT], "responses": [*TOKENS, 0], "attention_mask": [0, 1, 1, 1, 1, 1, 0],
        "response_mask": [1, 1, 1, 0], "rollout_log_probs": [*A, 0.0], "old_log_probs": [*B, 0.0],
    },
    "slime": {
        "tokens": [*PROMPT, *TOKENS], "response_length": 3, "loss_mask": [1, 1, 1], "rollout_log_probs": A, "log_probs": B,
        "status": "completed",
    },
    "nemo-rl": {
        "input_ids": [*PROMPT, *TOKENS, 0], "token_mask": [0, 0, 1, 1, 1, 0], "input_lengths": 5,
        "generation_logprobs": [0.0, 0.0, *A, 0.0], "prev_logprobs": [0.0, -4.0, *B, 0.0],
    },
    "prime-rl": {
        "input_ids": [*PROMPT, *TOKENS], "loss_mask": [False, False, True, True, True], "inference_logprobs": [0.0, 0.0, *A],
        "trainer_logprobs": [0.0, -4.0, *B], "temperature": 1.0,
    },
    "openrlhf": {
        "sequences": [*PROMPT, *TOKENS], "attention_mask": [1] * 5, "action_mask": [0, 1, 1, 1],
        "rollout_log_probs": [0.0, *A], "action_log_probs": [0.0, *B],
    },
    "open-instruct": {
        "query_responses": [*PROMPT, *TOKENS], "response_masks": [0, 0, 1, 1, 1], "vllm_logprobs": [None, None, *A],
        "local_logprobs": [None, -4.0, *B],
    },
    "areal": {
        "input_ids": [*PROMPT, *TOKENS], "loss_mask": [0, 0, 1, 1, 1], "logprobs": [0.0, 0.0, *A], "versions": [0] * 5,
        "prox_logp": [0.0, 0.0, *B],
    },
    "compare.py": {"prompt_ids": PROMPT, "gen_ids": TOKENS, "gen_logprobs": A, "text": "..."},
}  # fmt: skip


def _file(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("framework", ROWS)
def test_the_same_tokens_in_every_layout(framework, tmp_path):
    found = read_rollouts(_file(tmp_path / "rollouts.jsonl", ROWS[framework], ROWS[framework]))

    assert found.framework == framework
    assert len(found.completions) == 2
    assert found.completions[0].prompt_ids == tuple(PROMPT)
    assert found.completions[0].token_ids == tuple(TOKENS)
    assert found.completions[0].logprobs == tuple(A)
    assert found.train[0] == (tuple(B) if framework != "compare.py" else ())


@pytest.mark.parametrize("framework", sorted(ROWS.keys() & PROFILES.keys()))
def test_a_file_gives_the_frameworks_own_metrics(framework, tmp_path):
    found = read_rollouts(_file(tmp_path / "rollouts.jsonl", ROWS[framework]))
    pair = paired([one.logprobs for one in found.completions], found.train)
    named = {row.key: METRICS[row.metric].of(pair) for row in PROFILES[framework]}

    assert len(named) == len(PROFILES[framework])
    assert all(value == value for value in named.values())


def test_parquet_is_read_as_the_same_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.Table.from_pylist([ROWS["verl"]]), tmp_path / "rollouts.parquet")

    assert read_rollouts(tmp_path / "rollouts.parquet").completions[0].logprobs == tuple(A)


def test_every_layout_has_a_profile_or_is_a_plain_format():
    assert ROWS.keys() - PROFILES.keys() == {"parity-audit", "compare.py"}
    assert PROFILES.keys() <= ROWS.keys()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"old_per_token_logps": B}, "rollout-row"),
        ({"completion_mask": [1, 1]}, "rollout-row"),
        ({"completion_mask": [0, 0, 0, 0]}, "no-tokens"),
        ({"completion_ids": [1, 2.5, 3, 4]}, "rollout-row"),
        ({"completion_ids": "7 8 2"}, "rollout-row"),
        ({"sampling_per_token_logps": ["a", 0, 0, 0]}, "rollout-row"),
    ],
)
def test_a_broken_row_is_an_error_with_its_line(change, code, tmp_path):
    path = _file(tmp_path / "rollouts.jsonl", {**ROWS["trl"], **change})
    with pytest.raises(NotJudged) as error:
        read_rollouts(path)
    assert error.value.code == code


@pytest.mark.parametrize(
    ("name", "text", "kind", "code"),
    [
        ("a.jsonl", "{broken\n", NotJudged, "rollout-row"),
        ("a.jsonl", "[1]\n", NotJudged, "rollout-row"),
        ("a.jsonl", "", NotJudged, "no-tokens"),
        ("a.jsonl", '{"text": "hello"}\n', UsageError, "rollout-format"),
        ("a.pt", "x", UsageError, "rollout-file"),
        ("a.parquet", "not parquet", NotJudged, "rollout-row"),
    ],
)
def test_what_is_no_rollout_file_is_refused(name, text, kind, code, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(kind) as error:
        read_rollouts(tmp_path / name)
    assert error.value.code == code


def test_missing_files_and_unknown_formats_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no file"):
        read_rollouts(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="no rollout format"):
        read_rollouts(_file(tmp_path / "a.jsonl", ROWS["trl"]), framework="trll")


def test_tokens_are_written_one_per_row(tmp_path):
    found = read_rollouts(_file(tmp_path / "rollouts.jsonl", ROWS["trl"], ROWS["trl"]))
    pair = paired([one.logprobs for one in found.completions], found.train)
    jsonl, table = write_tokens(token_table(pair, found.completions), tmp_path)
    rows = [json.loads(line) for line in jsonl.read_text().splitlines()]

    assert [row["token_id"] for row in rows] == TOKENS * 2
    assert rows[2]["difference"] == pytest.approx(-0.2)
    assert [row["sequence"] for row in csv.DictReader(table.open())] == ["0"] * 3 + ["1"] * 3
